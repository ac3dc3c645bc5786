// The functions of CUDA's math library that libm has too, and those that it makes from them.
// Declared here and not by <math.h>: C++'s brings 20,000 lines with it, which took most of the time
// that a kernel takes to compile.
#pragma once

#include "cuda_host.h"

// Like CUDA and <math.h>, with an overload for float, so that none is computed in double unseen.
#define OF_ONE(name)               \
  extern "C" double name(double);  \
  extern "C" float name##f(float); \
  __forceinline__ float name(float x) { return name##f(x); }
#define OF_TWO(name)                      \
  extern "C" double name(double, double); \
  extern "C" float name##f(float, float); \
  __forceinline__ float name(float x, float y) { return name##f(x, y); }

OF_ONE(acos)
OF_ONE(acosh)
OF_ONE(asin)
OF_ONE(asinh)
OF_ONE(atan)
OF_ONE(atanh)
OF_ONE(cbrt)
OF_ONE(ceil)
OF_ONE(cos)
OF_ONE(cosh)
OF_ONE(erf)
OF_ONE(erfc)
OF_ONE(exp)
OF_ONE(exp2)
OF_ONE(expm1)
OF_ONE(fabs)
OF_ONE(floor)
OF_ONE(lgamma)
OF_ONE(log)
OF_ONE(log10)
OF_ONE(log1p)
OF_ONE(log2)
OF_ONE(logb)
OF_ONE(nearbyint)
OF_ONE(rint)
OF_ONE(round)
OF_ONE(sin)
OF_ONE(sinh)
OF_ONE(sqrt)
OF_ONE(tan)
OF_ONE(tanh)
OF_ONE(tgamma)
OF_ONE(trunc)
OF_TWO(atan2)
OF_TWO(copysign)
OF_TWO(fdim)
OF_TWO(fmax)
OF_TWO(fmin)
OF_TWO(fmod)
OF_TWO(hypot)
OF_TWO(nextafter)
OF_TWO(pow)
OF_TWO(remainder)
#undef OF_ONE
#undef OF_TWO

extern "C" double fma(double, double, double);
extern "C" float fmaf(float, float, float);
__forceinline__ float fma(float x, float y, float z) { return fmaf(x, y, z); }
extern "C" double ldexp(double, int);
extern "C" float ldexpf(float, int);
__forceinline__ float ldexp(float x, int by) { return ldexpf(x, by); }

__forceinline__ float rsqrtf(float x) { return 1.0f / sqrtf(x); }
__forceinline__ float rsqrt(float x) { return rsqrtf(x); }
__forceinline__ double rsqrt(double x) { return 1.0 / sqrt(x); }
__forceinline__ float __expf(float x) { return expf(x); }
