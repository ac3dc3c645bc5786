// Sums of e4m3 products: tensor cores keep 14 bits of them, so that those of every 512 of K are
// added up in fp32 (experiments/notes/23-fp8.md has what that costs and loses).
#pragma once

#include "types.cuh"

namespace gtco {

constexpr int PROMOTED_ATOMS = 4;  // of 128 bytes of K

// Steps of ATOMS whose products the tensor cores add up.
template <int ATOMS>
constexpr int PROMOTED_STEPS = ATOMS < PROMOTED_ATOMS ? PROMOTED_ATOMS / ATOMS : 1;

// Whether there are more steps than those.
template <class Element, int ATOMS>
constexpr bool is_promoted(int steps) {
  return sizeof(Element) == 1 && steps > PROMOTED_STEPS<ATOMS>;
}

}  // namespace gtco
