// Pauses at random places, for tests.
#pragma once

#include <cstdint>

namespace qla::cuda::ptx {

// Built with QLA_JITTER (tests alone): a warp pauses here every now and then, up to 8 us and rarely up to 260. Whatever the roles
// of a kernel expect of each other's speed breaks then: a phase that passes by while nobody looks, a reader that was thought far
// behind.
__device__ __forceinline__ void jitter() {
#ifdef QLA_JITTER
  uint32_t x = 0;
  asm volatile(
      "{.reg .pred often, rarely; .reg .u32 y;\n"
      "mov.u32 %0, %%clock; mov.u32 y, %%warpid; mad.lo.u32 %0, y, 0x9E3779B1, %0; mul.lo.u32 %0, %0, 0x85EBCA6B;\n"
      "shr.u32 y, %0, 22; setp.lt.u32 often, y, 48; setp.lt.u32 rarely, y, 1;\n"
      "bfe.u32 %0, %0, 6, 13; @rarely shl.b32 %0, %0, 5;\n"
      "@often nanosleep.u32 %0;}"
      : "+r"(x)::"memory");
#endif
}

}  // namespace qla::cuda::ptx
