// Scalar functions of the pointwise ops, one overload a compute type, with torch's meaning of NaN.
#pragma once

#include "ptx.cuh"

namespace gtco::math {

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// Those of CUDA's math library.
#define OF_ONE(name)                                                    \
  __device__ __forceinline__ float name(float x) { return name##f(x); } \
  __device__ __forceinline__ double name(double x) { return ::name(x); }
#define OF_TWO(name)                                                                \
  __device__ __forceinline__ float name(float x, float y) { return name##f(x, y); } \
  __device__ __forceinline__ double name(double x, double y) { return ::name(x, y); }
OF_ONE(acos)
OF_ONE(acosh)
OF_ONE(asin)
OF_ONE(asinh)
OF_ONE(atan)
OF_ONE(atanh)
OF_ONE(cos)
OF_ONE(cosh)
OF_ONE(erf)
OF_ONE(erfc)
OF_ONE(exp)
OF_ONE(exp2)
OF_ONE(expm1)
OF_ONE(log)
OF_ONE(log10)
OF_ONE(log1p)
OF_ONE(log2)
OF_ONE(rsqrt)
OF_ONE(sin)
OF_ONE(sinh)
OF_ONE(sqrt)
OF_ONE(tan)
OF_ONE(tanh)
OF_TWO(atan2)
OF_TWO(copysign)
OF_TWO(fmod)
OF_TWO(hypot)
#undef OF_ONE
#undef OF_TWO

// Whole numbers stay as they are.
__device__ __forceinline__ float floor(float x) { return floorf(x); }
__device__ __forceinline__ double floor(double x) { return ::floor(x); }
template <class T>
__device__ __forceinline__ T floor(T x) {
  return x;
}
__device__ __forceinline__ float ceil(float x) { return ceilf(x); }
__device__ __forceinline__ double ceil(double x) { return ::ceil(x); }
template <class T>
__device__ __forceinline__ T ceil(T x) {
  return x;
}

// To the nearest whole number, the even one of two.
__device__ __forceinline__ float round(float x) { return rintf(x); }
__device__ __forceinline__ double round(double x) { return rint(x); }
template <class T>
__device__ __forceinline__ T round(T x) {
  return x;
}

__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ double abs(double x) { return fabs(x); }
template <class T>
__device__ __forceinline__ T abs(T x) {
  return x < T(0) ? T(-x) : x;
}

__device__ __forceinline__ float pow(float x, float y) { return powf(x, y); }
__device__ __forceinline__ double pow(double x, double y) { return ::pow(x, y); }
// Integers wrap around; a negative exponent gives what torch gives: 1, -1 or 0.
template <class T>
__device__ __forceinline__ T pow(T x, T y) {
  if (y < T(0)) return x == T(1) ? T(1) : (x == T(-1) ? T((y & 1) ? -1 : 1) : T(0));
  T result = T(1);
#pragma unroll 1
  for (T left = y; left > T(0); left = T(left >> 1)) {
    if (left & 1) result = T(result * x);
    x = T(x * x);
  }
  return result;
}

// What is left of a division towards zero, of whole numbers too; and of one towards minus infinity,
// which has the divisor's sign.
template <class T>
__device__ __forceinline__ T fmod(T x, T y) {
  return T(x % y);
}
template <class T>
__device__ __forceinline__ T remainder(T x, T y) {
  const T rest = fmod(x, y);
  return rest != T(0) && (y < T(0)) != (rest < T(0)) ? T(rest + y) : rest;
}
template <class T>
__device__ __forceinline__ T floor_divide(T x, T y) {
  const T rest = fmod(x, y);
  T whole = T((x - rest) / y);
  if (rest != T(0) && (y < T(0)) != (rest < T(0))) whole = T(whole - T(1));
  if constexpr (T(0.5) == T(0)) {
    return whole;
  } else {  // a zero has the quotient's sign
    return y == T(0) ? x / y : copysign(round(whole), x / y);
  }
}

// The larger and the smaller of two; NaN if either is NaN (fmaxf would drop it).
__device__ __forceinline__ float max_nan(float x, float y) { return ptx::max_nan(x, y); }
__device__ __forceinline__ float min_nan(float x, float y) { return ptx::min_nan(x, y); }
template <class T>
__device__ __forceinline__ T max_nan(T x, T y) {
  return x != x || x > y ? x : y;
}
template <class T>
__device__ __forceinline__ T min_nan(T x, T y) {
  return x != x || x < y ? x : y;
}
template <class T>
__device__ __forceinline__ T relu(T x) {
  return max_nan(x, T(0));
}

// x Phi(x) = max(x, 0) - |x| Phi(-|x|), with a polynomial for log2 of the tail Phi(-|x|): within
// 2.4e-7 of the exact value, and within 2e-5 of it in relation down to x = -5.5. One exponential
// and no division: in the epilogue of a GEMM this is most of the arithmetic.
__device__ __forceinline__ float gelu_none(float x) {
  // From 16 on the tail is zero. Infinity stays harmless, minus infinity times zero is NaN as in
  // torch.
  const float z = fabsf(max_nan(-x, -16.0f));
  float power = -1.7172821e-06f;
  power = fmaf(power, z, 5.9613638e-05f);
  power = fmaf(power, z, -9.1873616e-04f);
  power = fmaf(power, z, 8.4813060e-03f);
  power = fmaf(power, z, -5.3957060e-02f);
  power = fmaf(power, z, -4.5840365e-01f);
  power = fmaf(power, z, -1.1513100e+00f);
  power = fmaf(power, z, -9.9998331e-01f);
  return fmaf(-z, ptx::ex2(power), fmaxf(x, 0.0f));
}
__device__ __forceinline__ double gelu_none(double x) {
  return 0.5 * x * (1.0 + ::erf(x * 0.70710678118654752));
}

__device__ __forceinline__ float sigmoid(float x) {
  return ptx::rcp(1.0f + ptx::ex2(-1.4426950408889634f * x));
}
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }

// 0.5 (1 + tanh u) = sigmoid(2 u).
template <class T>
__device__ __forceinline__ T gelu_tanh(T x) {
  return x * sigmoid(T(1.5957691216057308) * (x + T(0.044715) * x * x * x));
}

}  // namespace gtco::math
