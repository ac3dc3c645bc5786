// The place in a ring of stages, as a thread that fills or drains it goes round.
#pragma once

#include "types.cuh"

namespace gtco {

// Where the ring's next stage is, and the parity of its phase.
template <int STAGES>
struct RingPlace {
  int slot;
  u32 phase;

  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  template <int STEPS>
  __device__ __forceinline__ void skip() {
    slot += STEPS % STAGES;
    phase ^= STEPS / STAGES & 1;
    if (slot >= STAGES) slot -= STAGES, phase ^= 1;
  }
};

}  // namespace gtco
