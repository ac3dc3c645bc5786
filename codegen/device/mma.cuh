// mma.sync by the type of its operands: 16 or 8 bits wide, or float, of which tf32 is multiplied.
// Sums of 8-bit integers are integers, and exact up to a K of 131072.
//
// EXACT floats are split into two tf32, high + low, which have 22 of their 24 bits; of the four
// products all but low * low are taken (Ootomo and Yokota 2022). Tensor cores cut what they add up,
// which would bias a long sum, so each step's product of the high parts is added by itself.
#pragma once

#include "ptx.cuh"

namespace gtco {

constexpr u32 TF32_BITS = 0xffffe000;  // of a float, what a tensor core looks at
constexpr u32 HALF_TF32 = 0x1000;      // of the last of these

// The nearest tf32; of the largest floats, which are nearer to infinity, the next. Of what is no
// number, bits that say so stay.
__device__ __forceinline__ u32 nearest_tf32(float x) {
  constexpr float LARGEST = 0x1.ffep127f;
  const u32 bits = __float_as_uint(x);
  return (fabsf(x) < LARGEST ? bits + HALF_TF32 : bits) & TF32_BITS;
}

template <class Config, class = void>
struct IsExact : Constant<bool, false> {};
template <class Config>
struct IsExact<Config, decltype(static_cast<void>(Config::EXACT))> : Constant<bool, Config::EXACT> {
};

// Whether the products of a kernel's floats are to be as good as fp32's.
template <class Config>
inline constexpr bool is_exact = IsExact<Config>::value;

// Whether the results of a batch, the groups of a convolution, lie side by side: its configuration
// says GROUPED.
template <class C, class = void>
struct IsGrouped : Constant<bool, false> {};
template <class C>
struct IsGrouped<C, decltype(static_cast<void>(C::GROUPED))> : Constant<bool, C::GROUPED> {};

// What mma.sync takes at a time: K elements of both operands, which are 32 bytes of a row.
template <class T, bool EXACT = false>
struct Mma {
  static_assert(!EXACT || sizeof(T) == 4, "narrow operands are multiplied exactly as they are");
  static constexpr int K = 32 / sizeof(T);
  static constexpr int PARTS = EXACT ? 2 : 1;  // of operands (high, low) and of sums
  using Sum = sum_t<T>;

  // Adds the product of one part of each operand.
  __device__ __forceinline__ static void multiply(Sum (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (sizeof(T) == 4) {
      ptx::mma_m16n8k8(d, a, b0, b1);
    } else if constexpr (sizeof(T) == 1) {
      ptx::mma_m16n8k32(d, a, b0, b1);
    } else {
      ptx::mma_m16n8k16<T>(d, a, b0, b1);
    }
  }

  // Adds a product, of which B has registers `first` and the next. Where sums are LONG, what each
  // sum of high parts is rounded by goes to the low ones.
  template <bool LONG = false, int COUNT>
  __device__ __forceinline__ static void mma(Sum (&d)[PARTS][4], const u32 (&a)[PARTS][4],
                                             const u32 (&b)[PARTS][COUNT], int first = 0) {
    if constexpr (EXACT) {
      float high[4] = {};
      multiply(d[1], a[1], b[0][first], b[0][first + 1]);
      multiply(d[1], a[0], b[1][first], b[1][first + 1]);
      multiply(high, a[0], b[0][first], b[0][first + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = d[0][i] + high[i];
        if constexpr (LONG) d[1][i] += high[i] - (sum - d[0][i]);
        d[0][i] = sum;
      }
    } else if constexpr (is_same<T, e4m3_t>) {  // the tensor core's sums have 14 bits of fraction
      float product[4] = {};
      multiply(product, a[0], b[0][first], b[0][first + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) d[0][i] += product[i];
    } else {
      multiply(d[0], a[0], b[0][first], b[0][first + 1]);
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

  // The same, in r[0], become those of all parts.
  template <int COUNT>
  __device__ __forceinline__ static void split(u32 (&r)[PARTS][COUNT]) {
    if constexpr (EXACT) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const float x = __uint_as_float(r[0][i]);
        r[0][i] = nearest_tf32(x);
        r[1][i] = __float_as_uint(x - __uint_as_float(r[0][i]));  // which will be cut
      }
    } else {
      round(r[0]);
    }
  }

  // Element i of a sum.
  __device__ __forceinline__ static float total(const Sum (&d)[PARTS][4], int i) {
    if constexpr (EXACT) {
      return total(d[0][i], d[1][i]);
    } else {
      return static_cast<float>(d[0][i]);
    }
  }

  // Of the sums of high parts and of products with low ones. Where the first is not finite, neither
  // was a high part, and the low ones are inf - inf and 0 * inf.
  __device__ __forceinline__ static float total(float high, float low) {
    const bool finite = (__float_as_uint(high) & 0x7f800000) != 0x7f800000;
    return finite ? high + low : high;
  }
};

}  // namespace gtco
