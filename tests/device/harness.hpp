// Counts checks: CHECK_THAT(condition, "words", values...); summary() prints "N passed, M failed" and is main's result.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace qla::test {

inline int passed = 0, failed = 0;

inline bool check(bool good, const std::string& what) {
  (good ? passed : failed)++;
  if (!good) {
    std::printf("FAILED %s\n", what.c_str());
    std::fflush(stdout);
  }
  return good;
}
// Two multisets of tuples; where they differ, what is missing and what is too much. columns: names of the tuple's elements.
template <class Key>
bool check_items(const std::multiset<Key>& got, const std::multiset<Key>& want, const std::string& what, const char* columns) {
  const auto show = [&](const char* kind, const Key& key) {
    std::printf("  %s %s:", kind, columns);
    std::apply([](auto... x) { (std::printf(" %lld", static_cast<long long>(x)), ...); }, key);
    std::printf("\n");
  };
  if (check(got == want, what)) return true;
  for (const Key& k : want)
    if (!got.count(k)) show("missing", k);
  for (const Key& k : got)
    if (!want.count(k)) show("extra  ", k);
  return false;
}
inline int summary(const char* name) {
  std::printf("%s: %d passed %d failed\n", name, passed, failed);
  return failed != 0;
}
inline void cuda_ok(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  std::printf("FAILED %s: %s\n", what, cudaGetErrorString(status));
  std::exit(1);
}

// device memory with 256 guard bytes of 0xff on either side, filled with 0xff (NaN in every float type)
template <typename T>
class Device {
 public:
  explicit Device(size_t count) : count_(count) {
    cuda_ok(cudaMalloc(&base_, bytes() + 2 * kGuard), "cudaMalloc");
    cuda_ok(cudaMemset(base_, 0xff, bytes() + 2 * kGuard), "cudaMemset");
  }
  explicit Device(const std::vector<T>& host) : Device(host.size()) { upload(host); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(base_); }
  T* get() const { return reinterpret_cast<T*>(static_cast<char*>(base_) + kGuard); }
  size_t count() const { return count_; }
  void upload(const std::vector<T>& host) {
    cuda_ok(cudaMemcpy(get(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
  }
  std::vector<T> download() const {
    std::vector<T> host(count_);
    cuda_ok(cudaMemcpy(host.data(), get(), count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return host;
  }
  bool guards_intact() const {
    std::vector<unsigned char> edge(2 * kGuard);
    cuda_ok(cudaMemcpy(edge.data(), base_, kGuard, cudaMemcpyDeviceToHost), "guard");
    cuda_ok(cudaMemcpy(edge.data() + kGuard, static_cast<char*>(base_) + kGuard + bytes(), kGuard, cudaMemcpyDeviceToHost),
            "guard");
    for (unsigned char b : edge)
      if (b != 0xff) return false;
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes() const { return (count_ * sizeof(T) + 15) / 16 * 16; }
  size_t count_;
  void* base_ = nullptr;
};

inline int multiprocessors() {
  int device = 0, n = 0;
  cuda_ok(cudaGetDevice(&device), "cudaGetDevice");
  cuda_ok(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return n;
}

}  // namespace qla::test
