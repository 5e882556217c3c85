// The two pointer rules of the C ABI: structs carry their size, results need somewhere to go.
#pragma once

#include "core/status.hpp"
#include "qla/qla.h"

#define QLA_STRINGIFY2(x) #x
#define QLA_STRINGIFY(x) QLA_STRINGIFY2(x)
#define QLA_VERSION_TEXT \
  QLA_STRINGIFY(QLA_VERSION_MAJOR) "." QLA_STRINGIFY(QLA_VERSION_MINOR) "." QLA_STRINGIFY(QLA_VERSION_PATCH)

namespace qla::api {

// A struct of another size was compiled against another header: reading it would read past its end or miss what it asks for.
template <typename Struct>
Struct& checked(Struct* pointer, const char* name) {
  QLA_CHECK(pointer != nullptr, name, ": expected a pointer to a filled struct, got NULL; pass its address");
  QLA_CHECK(pointer->struct_size == sizeof(Struct), name, ".struct_size: expected ", sizeof(Struct), ", got ",
            pointer->struct_size, "; set it to sizeof the struct, and compile against the qla.h of this library (version ",
            QLA_VERSION_TEXT, ")");
  return *pointer;
}

template <typename T>
T& required(T* pointer, const char* name) {
  QLA_CHECK(pointer != nullptr, name, ": expected a pointer to receive the result, got NULL; pass its address");
  return *pointer;
}

}  // namespace qla::api
