// The only place where exceptions become status codes: nothing thrown inside crosses the C ABI.
#pragma once

#include <exception>
#include <new>

#include "core/last_error.hpp"
#include "core/status.hpp"

namespace qla::api {

template <typename Body>
qla_status guarded(Body&& body) noexcept {
  try {
    body();
    return QLA_OK;
  } catch (const Error& error) {
    set_last_error(error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    set_last_error("host memory: an allocation failed; free memory or pass a smaller problem");
    return QLA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return QLA_INTERNAL_ERROR;
  } catch (...) {
    set_last_error("internal: an exception of unknown type");
    return QLA_INTERNAL_ERROR;
  }
}

}  // namespace qla::api
