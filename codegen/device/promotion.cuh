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
  return is_same<Element, e4m3_t> && steps > PROMOTED_STEPS<ATOMS>;
}

// Where products are added up: beside the floats of the epilogue (APART), if those are promoted or
// of integers, or in them.
template <bool APART, class Sums, class Floats>
__device__ __forceinline__ auto& sums_of(Sums& apart, Floats& floats) {
  if constexpr (APART) {
    return apart;
  } else {
    return floats;
  }
}

}  // namespace gtco
