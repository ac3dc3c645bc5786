// When the kernel behind this one may begin: a knob of the plan.
#pragma once

#include "ptx.cuh"

namespace gtco {

enum class Trigger { EARLY, AFTER_LOOP };

#ifdef GTCO_TRIGGER_AFTER_LOOP
constexpr Trigger TRIGGER = Trigger::AFTER_LOOP;
#else
constexpr Trigger TRIGGER = Trigger::EARLY;
#endif

// Lets the next kernel's blocks begin where the plan wants it so. Of a block's threads the first
// that comes here counts (PTX 9.7.13.13), so "after the loop" stands behind a barrier of all of
// them.
template <Trigger HERE>
__device__ __forceinline__ void trigger_dependents() {
  if constexpr (HERE == TRIGGER) ptx::griddepcontrol_launch_dependents();
}

}  // namespace gtco
