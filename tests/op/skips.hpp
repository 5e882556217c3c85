// Recipes without a C++ test on the CPU, and why. A recipe that needs torch is not here: its tests carry pytest's marker
// br(number).
#pragma once

namespace qla::test {

struct Skip {
  const char* recipe;
  const char* reason;
};

inline constexpr Skip kSkips[] = {
    {"BR-79", "P2, speed: `qla bench` measures the host cost; tests never time"},
    {"BR-89", "P2, speed: `qla bench`; tests never time"},
    {"BR-88", "P2: not one test but all: every call of the suite has outputs, saved buffer and workspace filled with NaN"},
    {"BR-91", "P2, packaging: the continuous integration builds the wheel and imports it from another directory"},
};

}  // namespace qla::test
