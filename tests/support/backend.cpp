#include "support/backend.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <sstream>

namespace qla::test {

void* Backend::allocate(size_t bytes) const {
  void* pointer = std::aligned_alloc(256, (bytes + 511) / 256 * 256);
  if (!pointer) throw std::bad_alloc();
  return pointer;
}
void Backend::release(void* pointer) const { std::free(pointer); }
void Backend::upload(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }
void Backend::download(void* to, const void* from, size_t bytes) const { std::memcpy(to, from, bytes); }

qla_status Backend::forward_workspace(const qla_gdn_forward_args& args, size_t* bytes) const {
  return qla_gdn_forward_workspace(&args, bytes);
}
qla_status Backend::forward_saved(const qla_gdn_forward_args& args, size_t* bytes) const {
  return qla_gdn_forward_saved(&args, bytes);
}
qla_status Backend::backward_workspace(const qla_gdn_backward_args& args, size_t* least, size_t* best) const {
  return qla_gdn_backward_workspace(&args, least, best);
}
qla_status Backend::forward(const qla_gdn_forward_args& args) const { return qla_gdn_forward(&args); }
qla_status Backend::backward(const qla_gdn_backward_args& args) const { return qla_gdn_backward(&args); }
std::string Backend::last_error() const { return qla_last_error(); }

namespace {
class Cpu : public Backend {
 public:
  std::string name() const override { return "cpu"; }
  int32_t id() const override { return QLA_BACKEND_CPU; }
};
}  // namespace

const std::vector<const Backend*>& backends() {
  static const std::vector<const Backend*> list = [] {
    static const Cpu cpu;
    std::vector<const Backend*> found;
    if (const char* wanted = std::getenv("QLA_TEST_BACKEND")) {
      std::istringstream names(wanted);
      for (std::string name; std::getline(names, name, ',');) {
        if (name == "cpu") found.push_back(&cpu);
        if (name == "cuda" && cuda_backend()) found.push_back(cuda_backend());
        if (name == "reference") found.push_back(reference_backend(false));
        if (name == "emulator") found.push_back(reference_backend(true));
      }
      return found;
    }
    if (std::string(qla_cpu_level()) != "none") found.push_back(&cpu);
    if (cuda_backend()) found.push_back(cuda_backend());
    return found;
  }();
  return list;
}

}  // namespace qla::test
