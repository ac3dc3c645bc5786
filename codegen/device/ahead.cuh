// What a kernel does for one that comes later in the plan.
#pragma once

#include "ptx.cuh"

namespace gtco {

// Brings this block's SHARE of a later kernel's BYTES of weights from device memory to L2. They are
// constants, so this need not wait for the kernel before.
template <i64 BYTES, int SHARE>
__device__ __forceinline__ void prefetch_ahead(const char* weights, int block, bool chosen) {
#if __CUDA_ARCH__ >= 900
  const i64 from = i64(block) * SHARE, left = BYTES - from;
  if (chosen && left > 0)
    ptx::cp_async_bulk_prefetch(weights + from, left < SHARE ? static_cast<u32>(left) : SHARE);
#endif
}

}  // namespace gtco
