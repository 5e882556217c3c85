# Kernels and their host side when there is nvcc, a stand-in that says so when there is none.
if(QLA_HAVE_CUDA)
  file(GLOB_RECURSE QLA_CUDA_SOURCES CONFIGURE_DEPENDS src/cuda/*.cu src/cuda/*.cpp)
  list(FILTER QLA_CUDA_SOURCES EXCLUDE REGEX "src/cuda/none\\.cpp$")
  if(NOT EXISTS ${CMAKE_SOURCE_DIR}/src/cuda/backend.cpp)  # kernels without their host side yet
    list(APPEND QLA_CUDA_SOURCES src/cuda/none.cpp)
  endif()
  add_library(qla_cuda OBJECT ${QLA_CUDA_SOURCES})
  set_target_properties(qla_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_SEPARABLE_COMPILATION OFF)
  target_include_directories(qla_cuda PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(qla_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-std=c++20 -lineinfo -Xptxas=-v --expt-relaxed-constexpr
                                          -Xcompiler=-fvisibility=hidden>)
  target_link_libraries(qla_cuda PUBLIC qla_options)
else()
  add_library(qla_cuda OBJECT src/cuda/none.cpp)
  target_link_libraries(qla_cuda PUBLIC qla_options)
endif()
