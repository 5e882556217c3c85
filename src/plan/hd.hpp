// Plan code runs on the host and inside kernels: header-only, no CUDA types, no containers, no exceptions.
#pragma once

#if defined(__CUDACC__)
#define QLA_HD __host__ __device__
#else
#define QLA_HD
#endif
