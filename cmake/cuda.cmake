# Kernels and their host side when there is nvcc, a stand-in that says so when there is none.
if(QLA_HAVE_CUDA)
  # CMake 3.25 does not know this nvcc's -std=c++20: let its C++17 mean that.
  set(CMAKE_CUDA_STANDARD 17)
  set(CMAKE_CUDA17_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA17_EXTENSION_COMPILE_OPTION "-std=c++20")
  file(GLOB_RECURSE QLA_CUDA_SOURCES CONFIGURE_DEPENDS src/cuda/*.cu src/cuda/*.cpp)
  list(FILTER QLA_CUDA_SOURCES EXCLUDE REGEX "src/cuda/none\\.cpp$")
  add_library(qla_cuda OBJECT ${QLA_CUDA_SOURCES})
  set_target_properties(qla_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_SEPARABLE_COMPILATION OFF)
  target_include_directories(qla_cuda PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(qla_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-lineinfo -Xptxas=-v --expt-relaxed-constexpr
                                          -diag-suppress=20012 -Xcompiler=-fvisibility=hidden>)
  target_link_libraries(qla_cuda PUBLIC qla_options)
else()
  add_library(qla_cuda OBJECT src/cuda/none.cpp)
  target_link_libraries(qla_cuda PUBLIC qla_options)
endif()
