// Subnormals are zero while we compute: decayed states pass through them, and on some processors each costs a hundred cycles.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace qla::cpu {

#if defined(__SSE2__)
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // flush to zero, denormals are zero
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};
inline void relax() { _mm_pause(); }
#elif defined(__aarch64__)
class FlushDenormals {
 public:
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | uint64_t{1} << 24));  // FZ: inputs and results
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  uint64_t saved_;
};
inline void relax() { asm volatile("yield"); }
#else
struct FlushDenormals {
  FlushDenormals() {}
};
inline void relax() {}
#endif

}  // namespace qla::cpu
