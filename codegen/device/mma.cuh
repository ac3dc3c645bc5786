// mma.sync by the type of its operands: 16 bits wide, or float, of which tf32 is multiplied.
#pragma once

#include "ptx.cuh"

namespace gtco {

// What mma.sync takes at a time: K elements of both operands, which are 32 bytes of a row.
template <class T>
struct Mma {
  static constexpr int K = 32 / sizeof(T);

  __device__ __forceinline__ static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (sizeof(T) == 4) {
      ptx::mma_m16n8k8(d, a, b0, b1);
    } else {
      ptx::mma_m16n8k16<T>(d, a, b0, b1);
    }
  }

  // Registers of an operand as they come from memory.
  template <int COUNT>
  __device__ __forceinline__ static void round(u32 (&r)[COUNT]) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) r[i] = ptx::cvt_tf32(__uint_as_float(r[i]));
    }
  }
};

}  // namespace gtco
