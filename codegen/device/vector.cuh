// Short vectors in registers: loads, stores, maps, reductions over lanes.
#pragma once

#include "math.cuh"

namespace gtco {

__device__ __forceinline__ float to_compute(half_t x) { return ptx::cvt_f32(x); }
__device__ __forceinline__ float to_compute(bf16_t x) { return ptx::cvt_f32(x); }
__device__ __forceinline__ float to_compute(e4m3_t x) { return ptx::cvt_f32(x); }
template <class T>
__device__ __forceinline__ compute_t<T> to_compute(T x) {
  return x;
}

// An integer that is cut to the 8 bits that it is stored in.
struct Steps {
  i32 count;
};

// x to the nearest integer, ties to even; NaN as what is below all. A float that 3 << 22 is added
// to has no digits behind the point, and the integer in its low bits; what is larger has larger
// bits.
__device__ __forceinline__ Steps to_steps(float x) {
  return {static_cast<i32>(__float_as_uint(fmaxf(x, -(1 << 22)) + (3 << 22)) - 0x4b400000)};
}

// x / scale to the nearest integer, ties to even, plus `zero`, from LOW to HIGH; no scale is near
// the ends of floats. A quotient by the nearest reciprocal is the nearest one once its remainder is
// divided too (Markstein 1990).
template <int LOW, int HIGH>
__device__ __forceinline__ Steps to_int8(float x, float scale, float zero) {
  const float guess = ptx::rcp(scale);
  const float reciprocal = fmaf(fmaf(-scale, guess, 1.0f), guess, guess);
  const float inside = fminf(fmaxf(x, (LOW - zero) * scale), (HIGH - zero) * scale);
  const float near = inside * reciprocal;
  const float quotient = fmaf(fmaf(-near, scale, inside), reciprocal, near);
  const u32 bits = __float_as_uint(quotient + (3 << 22));
  return {static_cast<i32>(bits + (static_cast<i32>(zero) - 0x4b400000))};
}

template <class T, class C>
__device__ __forceinline__ T from_compute(C x) {
  if constexpr (is_same<T, half_t>) {
    return ptx::cvt_f16(static_cast<float>(x));
  } else if constexpr (is_same<T, bf16_t>) {
    return ptx::cvt_bf16(static_cast<float>(x));
  } else if constexpr (is_same<T, e4m3_t>) {
    return {static_cast<u8>(ptx::cvt_e4m3x2(static_cast<float>(x), 0.0f))};
  } else if constexpr (is_same<C, Steps>) {
    return static_cast<T>(ptx::pack_s8(x.count, 0, 0));
  } else {
    return static_cast<T>(x);
  }
}

// What x becomes when it is stored as a T.
template <class T, class C>
__device__ __forceinline__ compute_t<T> round_to(C x) {
  return to_compute(from_compute<T>(x));
}

// {f(0), f(1), ... f(V - 1)}
template <int V, class F>
__device__ __forceinline__ auto map(F f) -> Vec<decltype(f(0)), V> {
  Vec<decltype(f(0)), V> r;
#pragma unroll
  for (int i = 0; i < V; ++i) r[i] = f(i);
  return r;
}

// In what SIZE bytes of elements T are kept. Elements of one byte are so in words: compilers take
// structures apart by their members, one instruction and more for each.
template <class T, int SIZE>
struct WordOf {
  using type = T;
};
template <>
struct WordOf<signed char, 4> {
  using type = u32;
};
template <>
struct WordOf<e4m3_t, 2> {
  using type = u16;
};
template <>
struct WordOf<e4m3_t, 4> : WordOf<e4m3_t, 2> {};
template <class T, int V>
using word_t = typename WordOf<T, V % 2   ? 1
                                  : V % 4 ? 2
                                          : 4>::type;

// As they lie in memory.
template <class T, int V, class Word = word_t<T, V>>
struct alignas(sizeof(T) * V <= 16 ? sizeof(T) * V : 16) Packed {
  Word data[V * sizeof(T) / sizeof(Word)];
};

// V neighbours in memory as they lie there; zeros where not `active`. `from` is aligned to the
// vector, up to 16 bytes.
template <int V, class T>
__device__ __forceinline__ Packed<T, V> load_packed(const T* from, bool active = true) {
  using Whole = Packed<T, V>;
  if (active) return *static_cast<const Whole*>(__builtin_assume_aligned(from, alignof(Whole)));
  return Whole{};
}

// The same, `otherwise` where not `there`: for several that are not to wait for one another.
template <int V, class T>
__device__ __forceinline__ Packed<T, V> load_packed_or(const T* from, bool there,
                                                       Packed<T, V> otherwise) {
  if constexpr (sizeof(otherwise) == 2)
    ptx::ld_global(reinterpret_cast<u16(&)[1]>(otherwise), from, there);
  else
    ptx::ld_global(reinterpret_cast<u32(&)[sizeof(otherwise) / 4]>(otherwise), from, there);
  return otherwise;
}

template <class T, int V, class C>
__device__ __forceinline__ Packed<T, V> pack(const Vec<C, V>& values) {
  Packed<T, V> packed;
  if constexpr (is_same<C, Steps> && V % 4 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 4) {
      const u32 upper = ptx::pack_s8(values[i + 2].count, values[i + 3].count, 0);
      packed.data[i / 4] = ptx::pack_s8(values[i].count, values[i + 1].count, upper);
    }
  } else if constexpr (is_same<T, e4m3_t> && V % 2 == 0) {
#pragma unroll
    for (int i = 0; i < V; i += 2) packed.data[i / 2] = ptx::cvt_e4m3x2(values[i], values[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) reinterpret_cast<T*>(&packed)[i] = from_compute<T>(values[i]);
  }
  return packed;
}

template <int V, class T>
__device__ __forceinline__ Vec<compute_t<T>, V> unpack(const Packed<T, V>& packed) {
  if constexpr (is_same<T, signed char> && V % 4 == 0)
    return map<V>([&](int i) { return ptx::signed_byte(packed.data[i / 4], i % 4); });
  else
    return map<V>([&](int i) { return to_compute(reinterpret_cast<const T*>(&packed)[i]); });
}

// The same in the compute type.
template <int V, class T>
__device__ __forceinline__ Vec<compute_t<T>, V> load(const T* from, bool active = true) {
  return unpack(load_packed<V>(from, active));
}

template <int V, class T, class C>
__device__ __forceinline__ void store(T* to, const Vec<C, V>& values, bool active = true) {
  if (active) *reinterpret_cast<Packed<T, V>*>(to) = pack<T>(values);
}

// Butterfly over groups of LANES neighbouring lanes, or over those of them that are EACH apart:
// every lane gets the result, always the same bits. All 32 lanes take part.
template <int LANES, int EACH = 1>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset >= EACH; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

template <int LANES>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2)
    x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

}  // namespace gtco
