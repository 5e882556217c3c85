# The CPU backend. Owned by src/cpu: the sources compiled once for each instruction level are listed here.
file(GLOB QLA_CPU_SOURCES CONFIGURE_DEPENDS src/cpu/*.cpp)
add_library(qla_cpu OBJECT ${QLA_CPU_SOURCES})
target_link_libraries(qla_cpu PUBLIC qla_options)
