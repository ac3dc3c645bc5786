// Scalar types and short vectors. NVRTC's wheel ships no headers, so nothing here includes any.
#pragma once

namespace gtco {

using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct half_t {
  u16 bits;
};

struct bf16_t {
  u16 bits;
};

struct e4m3_t {  // 4 bits of exponent, 3 of mantissa: up to 448, no infinity
  u8 bits;
};

template <class T>
struct Compute {
  using type = T;
};
template <>
struct Compute<half_t> {
  using type = float;
};
template <>
struct Compute<bf16_t> {
  using type = float;
};
template <>
struct Compute<e4m3_t> {
  using type = float;
};
template <>
struct Compute<signed char> {
  using type = i32;
};

// The type arithmetic on a T is done in: float for every floating-point type up to 32 bits.
template <class T>
using compute_t = typename Compute<T>::type;

// What tensor cores add up products of Ts in.
template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<signed char> {
  using type = int;
};
template <class T>
using sum_t = typename SumOf<T>::type;

template <class T, int V>
struct Vec {
  T data[V];
  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

template <class T, T VALUE>
struct Constant {
  static constexpr T value = VALUE;
};

template <class A, class B>
struct IsSame : Constant<bool, false> {};
template <class A>
struct IsSame<A, A> : Constant<bool, true> {};
template <class A, class B>
inline constexpr bool is_same = IsSame<A, B>::value;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }

// The smallest that is no less than n; 0 for 0.
__host__ __device__ constexpr int power_of_two(int n) {
  int result = min_of(n, 1);
  while (result < n) result *= 2;
  return result;
}

}  // namespace gtco
