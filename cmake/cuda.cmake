# Kernels and their host side when there is nvcc, a stand-in that says so when there is none.
if(QLA_HAVE_CUDA)
  # CMake 3.25 does not know this nvcc's -std=c++20: let its C++17 mean that.
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA17_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA17_EXTENSION_COMPILE_OPTION "-std=c++20")
  file(GLOB_RECURSE QLA_CUDA_SOURCES CONFIGURE_DEPENDS src/cuda/*.cu src/cuda/*.cpp)
  list(FILTER QLA_CUDA_SOURCES EXCLUDE REGEX "src/cuda/none\\.cpp$")
  list(FILTER QLA_CUDA_SOURCES EXCLUDE REGEX "src/cuda/kernels/portable/")
  add_library(qla_cuda OBJECT ${QLA_CUDA_SOURCES})
  set_target_properties(qla_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_SEPARABLE_COMPILATION OFF)
  target_include_directories(qla_cuda PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(qla_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -Xptxas=-v --expt-relaxed-constexpr
                                          -diag-suppress=20012 -Xcompiler=-fvisibility=hidden>)
  target_link_libraries(qla_cuda PUBLIC qla_options)

  # The recurrence by mma.sync: one source for the targets that have no kernels of their own yet. `./dev ptxas` compiles it for all.
  add_library(qla_kernels_other_targets OBJECT EXCLUDE_FROM_ALL src/cuda/kernels/portable/portable.cu)
  set_target_properties(qla_kernels_other_targets PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_ARCHITECTURES "80-real;90a-real;100a-real;120a-real")
  target_compile_options(qla_kernels_other_targets PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -Xptxas=-v --expt-relaxed-constexpr
                                                           -diag-suppress=20012>)
  target_link_libraries(qla_kernels_other_targets PUBLIC qla_options)
else()
  add_library(qla_cuda OBJECT src/cuda/none.cpp)
  target_link_libraries(qla_cuda PUBLIC qla_options)
endif()
