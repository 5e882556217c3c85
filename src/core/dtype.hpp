// Element types of the C ABI: size, name, kind.
#pragma once

#include <cstdint>

#include "qla/qla.h"

namespace qla {

constexpr bool dtype_known(int32_t dtype) { return dtype >= QLA_FLOAT64 && dtype <= QLA_UINT8; }

constexpr int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
    case QLA_FLOAT64:
    case QLA_INT64:
      return 8;
    case QLA_FLOAT32:
    case QLA_INT32:
      return 4;
    case QLA_BFLOAT16:
    case QLA_FLOAT16:
      return 2;
    default:
      return 1;
  }
}

constexpr const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case QLA_FLOAT64:
      return "float64";
    case QLA_FLOAT32:
      return "float32";
    case QLA_BFLOAT16:
      return "bfloat16";
    case QLA_FLOAT16:
      return "float16";
    case QLA_INT32:
      return "int32";
    case QLA_INT64:
      return "int64";
    case QLA_BOOL8:
      return "bool8";
    case QLA_UINT8:
      return "uint8";
    default:
      return "unknown dtype";
  }
}

constexpr bool dtype_is_float(int32_t dtype) { return dtype >= QLA_FLOAT64 && dtype <= QLA_FLOAT16; }

}  // namespace qla
