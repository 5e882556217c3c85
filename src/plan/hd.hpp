// Plan code runs on the host and inside kernels: header-only, no CUDA types, no containers, no exceptions.
#pragma once

#if defined(__CUDACC__)
#define QLA_HD __host__ __device__
#define QLA_ONE_LOOP _Pragma("unroll 1")  // not unrolled: a kernel that runs once pays for every line of its code
#else
#define QLA_HD
#define QLA_ONE_LOOP
#endif
