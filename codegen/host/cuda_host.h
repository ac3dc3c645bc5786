// Just enough of CUDA C++ for the device library and a kernel to compile for a CPU. What waits for
// other threads or touches their memory is a call to the machine (instructions.h); every other load
// and store reaches it too, because kernels are compiled with the compiler's thread sanitizer and
// the machine stands in for its library.
#pragma once

#define __device__
#define __host__
#define __global__
#define __shared__
#define __restrict__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)

struct Index {
  int x, y, z;
};
extern Index threadIdx, blockIdx, gridDim;

struct float2 {
  float x, y;
};
__forceinline__ float2 make_float2(float x, float y) { return {x, y}; }

template <class To, class From>
__forceinline__ To bit_cast_to(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
}
__forceinline__ float __int_as_float(unsigned x) { return bit_cast_to<float>(x); }
__forceinline__ float __uint_as_float(unsigned x) { return bit_cast_to<float>(x); }
__forceinline__ unsigned __float_as_uint(float x) { return bit_cast_to<unsigned>(x); }
