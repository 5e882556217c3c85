# The CPU backend. src/cpu/kernels/level.cpp is compiled once for every instruction level (header-only Highway with static dispatch: the
# compiler's flags pick the vectors), the rest once for the baseline; src/cpu/dispatch.cpp picks a level at run time.
find_path(QLA_HIGHWAY_INCLUDE hwy/highway.h)
if(NOT QLA_HIGHWAY_INCLUDE)
  message(FATAL_ERROR "hwy/highway.h not found: apt-get install libhwy-dev")
endif()
file(GLOB QLA_CPU_SOURCES CONFIGURE_DEPENDS src/cpu/*.cpp)
add_library(qla_cpu OBJECT ${QLA_CPU_SOURCES})
target_link_libraries(qla_cpu PUBLIC qla_options)
find_package(Threads REQUIRED)
target_link_libraries(qla_cpu PUBLIC Threads::Threads)
# Idle workers wait inside the library: it must not be unmapped under them.
target_link_options(qla_cpu INTERFACE -Wl,-z,nodelete)

function(qla_cpu_level level)
  add_library(qla_cpu_${level} OBJECT src/cpu/kernels/level.cpp)
  # Under the sanitizers one level is instrumented: the levels are one source. All are made at -O1: g++ takes ten minutes for an
  # instrumented one at -O3.
  set(effort -O3)
  if(QLA_SANITIZE)
    set(effort -O1)
  endif()
  if(QLA_SANITIZE AND NOT level MATCHES "v3|native")
    target_include_directories(qla_cpu_${level} PRIVATE ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src)
  else()
    target_link_libraries(qla_cpu_${level} PRIVATE qla_options)
  endif()
  target_include_directories(qla_cpu_${level} SYSTEM PRIVATE ${QLA_HIGHWAY_INCLUDE})
  target_compile_definitions(qla_cpu_${level} PRIVATE QLA_LEVEL=${level})
  target_compile_options(qla_cpu_${level} PRIVATE ${effort} ${ARGN})
  target_sources(qla_cpu INTERFACE $<TARGET_OBJECTS:qla_cpu_${level}>)
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(static_dispatch -DHWY_COMPILE_ONLY_STATIC -DHWY_DISABLE_PCLMUL_AES)  # AES is not part of the levels and not used
  qla_cpu_level(scalar -DHWY_COMPILE_ONLY_SCALAR)
  qla_cpu_level(v2 -march=x86-64-v2 ${static_dispatch})
  qla_cpu_level(v3 -march=x86-64-v3 ${static_dispatch})
  qla_cpu_level(v4 -march=x86-64-v4 ${static_dispatch} -mprefer-vector-width=512)
else()
  qla_cpu_level(scalar -DHWY_COMPILE_ONLY_SCALAR)
  # The macro keeps Highway from making its NEON functions for "+crypto", which ours, made for the baseline, could not inline.
  qla_cpu_level(native -DHWY_COMPILE_ONLY_STATIC -DTOOLCHAIN_MISS_SYS_AUXV_H)
endif()
