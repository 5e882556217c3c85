// wgmma (sm_90a): one warpgroup, D[64 x N] (+)= A[64 x 16] B[16 x N], fp32 sums, both operands bf16 or both fp16.
//   wgmma_rs: A in registers (the accumulator fragment layout, packed), wgmma_ss: A in shared memory (K-major).
//   TransB = 0: B is K-major (rows of n, k contiguous); 1: MN-major (rows of k, n contiguous).
//   accumulate = 0 overwrites D. Make it a compile-time value in unrolled code: then no predicate is left.
// Between fence and wait nothing may touch the accumulators or the packed A registers (C7512, C7517).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace qla::cuda::ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// at most Pending groups are still in flight afterwards
template <int Pending = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The register lists of D, by N.
#define QLA_WGMMA_D16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define QLA_WGMMA_OUT16(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define QLA_WGMMA_D32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define QLA_WGMMA_OUT32(d)                                                                                                \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), \
      "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define QLA_WGMMA_D64                                      \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QLA_WGMMA_OUT64(d)                                                                                                 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),  \
      "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), \
      "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
      "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define QLA_WGMMA_D128                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"           \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31," \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47," \
  "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QLA_WGMMA_OUT128(d)                                                                                                \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),  \
      "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), \
      "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
      "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), \
      "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), \
      "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), \
      "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])

// P0..P6: the numbers of the operands that follow D. One macro for each form, expanded for every N and type below.
#define QLA_WGMMA_RS(N, TYPE, P0, P1, P2, P3, P4, P5, P6)                                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P5                                               \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" QLA_WGMMA_D##N \
               "}, "                                                                               \
               "{%" #P0 ",%" #P1 ",%" #P2 ",%" #P3 "}, %" #P4 ", p, 1, 1, %" #P6 ";}"              \
               : QLA_WGMMA_OUT##N(d)                                                               \
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(TransB))

#define QLA_WGMMA_SS(N, TYPE, P0, P1, P2, P3)                                                      \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #P2                                               \
               ", 0;\n"                                                                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" QLA_WGMMA_D##N \
               "}, "                                                                               \
               "%" #P0 ", %" #P1 ", p, 1, 1, 0, %" #P3 ";}"                                        \
               : QLA_WGMMA_OUT##N(d)                                                               \
               : "l"(a), "l"(b), "r"(accumulate), "n"(TransB))

// D: float[N / 2] of this thread: d[4 n8 + 2 h + c] = D[16 warp + lane / 4 + 8 h][8 n8 + 2 (lane % 4) + c].
template <typename T, int TransB, int Regs>
__device__ __forceinline__ void wgmma_rs(float (&d)[Regs], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b,
                                         int accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>);
  static_assert(Regs == 8 || Regs == 16 || Regs == 32 || Regs == 64);
  if constexpr (Regs == 8) {
    if constexpr (kBf16)
      QLA_WGMMA_RS(16, "bf16", 8, 9, 10, 11, 12, 13, 14);
    else
      QLA_WGMMA_RS(16, "f16", 8, 9, 10, 11, 12, 13, 14);
  } else if constexpr (Regs == 16) {
    if constexpr (kBf16)
      QLA_WGMMA_RS(32, "bf16", 16, 17, 18, 19, 20, 21, 22);
    else
      QLA_WGMMA_RS(32, "f16", 16, 17, 18, 19, 20, 21, 22);
  } else if constexpr (Regs == 32) {
    if constexpr (kBf16)
      QLA_WGMMA_RS(64, "bf16", 32, 33, 34, 35, 36, 37, 38);
    else
      QLA_WGMMA_RS(64, "f16", 32, 33, 34, 35, 36, 37, 38);
  } else {
    if constexpr (kBf16)
      QLA_WGMMA_RS(128, "bf16", 64, 65, 66, 67, 68, 69, 70);
    else
      QLA_WGMMA_RS(128, "f16", 64, 65, 66, 67, 68, 69, 70);
  }
}
template <typename T, int TransB, int Regs>
__device__ __forceinline__ void wgmma_rs(float (&d)[Regs], const uint32_t* a, uint64_t b, int accumulate) {
  wgmma_rs<T, TransB>(d, a[0], a[1], a[2], a[3], b, accumulate);
}

template <typename T, int TransB, int Regs>
__device__ __forceinline__ void wgmma_ss(float (&d)[Regs], uint64_t a, uint64_t b, int accumulate) {
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  static_assert(kBf16 || std::is_same_v<T, __half>);
  static_assert(Regs == 8 || Regs == 16 || Regs == 32 || Regs == 64);
  if constexpr (Regs == 8) {
    if constexpr (kBf16)
      QLA_WGMMA_SS(16, "bf16", 8, 9, 10, 11);
    else
      QLA_WGMMA_SS(16, "f16", 8, 9, 10, 11);
  } else if constexpr (Regs == 16) {
    if constexpr (kBf16)
      QLA_WGMMA_SS(32, "bf16", 16, 17, 18, 19);
    else
      QLA_WGMMA_SS(32, "f16", 16, 17, 18, 19);
  } else if constexpr (Regs == 32) {
    if constexpr (kBf16)
      QLA_WGMMA_SS(64, "bf16", 32, 33, 34, 35);
    else
      QLA_WGMMA_SS(64, "f16", 32, 33, 34, 35);
  } else {
    if constexpr (kBf16)
      QLA_WGMMA_SS(128, "bf16", 64, 65, 66, 67);
    else
      QLA_WGMMA_SS(128, "f16", 64, 65, 66, 67);
  }
}

#undef QLA_WGMMA_RS
#undef QLA_WGMMA_SS

}  // namespace qla::cuda::ptx
