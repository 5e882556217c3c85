// Where a test runs: the CPU or a CUDA device behind the C ABI, or (to test the tests) the reference or the emulator behind the
// same structs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "qla/qla.h"

namespace qla::test {

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string name() const = 0;
  virtual bool on_device() const { return false; }
  virtual int32_t id() const = 0;  // QLA_BACKEND_*
  virtual int32_t device() const { return -1; }
  virtual bool serves_backward() const { return true; }

  // Memory the backend computes on. On the CPU host() memory itself; else copies go through upload and download.
  virtual void* allocate(size_t bytes) const;  // 256-byte aligned
  virtual void release(void* pointer) const;
  virtual void upload(void* to, const void* from, size_t bytes) const;
  virtual void download(void* to, const void* from, size_t bytes) const;
  virtual void synchronize() const {}

  virtual qla_status forward_workspace(const qla_gdn_forward_args& args, size_t* bytes) const;
  virtual qla_status forward_saved(const qla_gdn_forward_args& args, size_t* bytes) const;
  virtual qla_status backward_workspace(const qla_gdn_backward_args& args, size_t* least, size_t* best) const;
  virtual qla_status forward(const qla_gdn_forward_args& args) const;
  virtual qla_status backward(const qla_gdn_backward_args& args) const;
  virtual std::string last_error() const;
};

// Those there are, by QLA_TEST_BACKEND (a comma-separated list of cpu, cuda, reference, emulator); by default cpu, and cuda where
// a device is served.
const std::vector<const Backend*>& backends();

const Backend* cuda_backend();  // null: no device, no driver, or a build without CUDA
const Backend* reference_backend(bool emulate);

}  // namespace qla::test
