# The float64 reference and the rounding emulator, for tests only: not part of libqla.so.
file(GLOB QLA_REFERENCE_SOURCES CONFIGURE_DEPENDS src/reference/*.cpp)
find_package(Threads REQUIRED)
add_library(qla_reference STATIC ${QLA_REFERENCE_SOURCES})
target_link_libraries(qla_reference PUBLIC qla_options Threads::Threads)
set(QLA_REFERENCE_PLAIN)
if(QLA_SANITIZE)
  set(QLA_REFERENCE_PLAIN ";-fno-sanitize=all")  # the one hot file of the suite, and no part of the product
endif()
# Sums may be regrouped so that they vectorise; NaN and inf keep their meaning. Optimised in every build type: it is the slow part of the suite.
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/reference/linear.cpp PROPERTIES COMPILE_OPTIONS
                            "-O3;-fassociative-math;-fno-signed-zeros;-fno-trapping-math${QLA_REFERENCE_PLAIN}")
