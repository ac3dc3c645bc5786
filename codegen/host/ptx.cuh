// The device library's ptx.cuh for a CPU: each instruction's meaning, from the PTX ISA manual 9.0.
#pragma once

#include "functions.h"
#include "instructions.h"

namespace gtco::ptx {

__forceinline__ int uniform(int x) { return x; }

__forceinline__ float cvt_f32(half_t x) {
  return static_cast<float>(bit_cast_to<_Float16>(x.bits));
}
__forceinline__ float cvt_f32(bf16_t x) { return __uint_as_float(u32(x.bits) << 16); }
__forceinline__ half_t cvt_f16(float x) { return {bit_cast_to<u16>(static_cast<_Float16>(x))}; }
__forceinline__ bf16_t cvt_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

__forceinline__ float cvt_f32(e4m3_t x) { return host::e4m3(x.bits); }
__forceinline__ u8 cvt_e4m3(float x) {
  const u8 sign = __float_as_uint(x) >> 31 << 7;
  const float size = fabsf(x);
  if (x != x) return 0x7f;
  if (size > 448.0f) return sign | 0x7e;
  if (size < 0x1p-6f) return sign | static_cast<u8>(nearbyintf(size * 512.0f));
  const int exponent = static_cast<int>(__float_as_uint(size) >> 23) - 127;
  const int eighths = static_cast<int>(nearbyintf(ldexpf(size, 3 - exponent)));  // 8 to 16
  return sign | static_cast<u8>(((exponent + 7) << 3) + eighths - 8);
}
__forceinline__ u16 cvt_e4m3x2(float low, float high) {
  return cvt_e4m3(low) | u16(cvt_e4m3(high)) << 8;
}

__forceinline__ u32 pack_s8(i32 low, i32 high, u32 upper) {
  const auto cut = [](i32 x) { return u32(u8(x < -128 ? -128 : x > 127 ? 127 : x)); };
  return cut(low) | cut(high) << 8 | upper << 16;
}

__forceinline__ i32 signed_byte(u32 word, int i) { return static_cast<signed char>(word >> 8 * i); }

template <class T>
__forceinline__ u32 cvt_pack(float low, float high) {
  if constexpr (is_same<T, half_t>) return cvt_f16(low).bits | u32(cvt_f16(high).bits) << 16;
  return cvt_bf16(low).bits | u32(cvt_bf16(high).bits) << 16;
}

template <class T>
inline constexpr host::Type TYPE = is_same<T, half_t>        ? host::Type::F16
                                   : is_same<T, bf16_t>      ? host::Type::BF16
                                   : is_same<T, e4m3_t>      ? host::Type::E4M3
                                   : is_same<T, signed char> ? host::Type::S8
                                                             : host::Type::TF32;

__forceinline__ float ex2(float x) { return exp2f(x); }
__forceinline__ float rcp(float x) { return 1.0f / x; }
__forceinline__ float max_nan(float x, float y) { return x != x || x > y ? x : y; }
__forceinline__ float min_nan(float x, float y) { return x != x || x < y ? x : y; }

__forceinline__ void ld_global_v4(u32 (&r)[4], const void* from, bool valid) {
  for (u32& each : r) each = 0;
  if (valid) host::ld_global(r, from, sizeof r);
}

template <class T, int N>
__forceinline__ void ld_global(T (&r)[N], const void* from, bool valid) {
  if (valid) host::ld_global(r, from, sizeof r);
}

__forceinline__ u32 shared_address(const void* p) { return host::shared_address(p); }
__forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) { host::ldmatrix(r, address, false); }
__forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  host::ldmatrix(r, address, true);
}

template <int BYTES, bool KEPT = (BYTES < 16)>
__forceinline__ void cp_async(u32 to_shared, const void* from_global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  static_assert(KEPT || BYTES == 16, "shorter copies go through L1");
  host::cp_async(to_shared, from_global, BYTES, valid);
}
__forceinline__ void cp_async_commit() { host::cp_async_commit(); }
template <int PENDING>
__forceinline__ void cp_async_wait() {
  host::cp_async_wait(PENDING);
}

template <class T>
__forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  host::mma(d, a, b0, b1, TYPE<T>);
}

__forceinline__ void mma_m16n8k32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  host::mma(d, a, b0, b1, host::Type::E4M3);
}
__forceinline__ void mma_m16n8k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  host::mma(d, a, b0, b1, host::Type::S8);
}

__forceinline__ u32 cvt_tf32(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fffffff;
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & 0xffffe000;
}

template <class T>
__forceinline__ u32 multiply(u32 a, u32 b) {
  if constexpr (sizeof(T) == 4) {
    return __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
  } else {
    const auto half = [&](int shift) {
      const T x{static_cast<u16>(a >> shift)}, y{static_cast<u16>(b >> shift)};
      const float product = cvt_f32(x) * cvt_f32(y);
      if constexpr (is_same<T, half_t>) {
        return u32(cvt_f16(product).bits) << shift;
      } else {
        return u32(cvt_bf16(product).bits) << shift;
      }
    };
    return half(0) | half(16);
  }
}

__forceinline__ void mma_m16n8k8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  host::mma(d, a, b0, b1, host::Type::TF32);
}

__forceinline__ void griddepcontrol_wait() { host::griddepcontrol_wait(); }
__forceinline__ void griddepcontrol_launch_dependents() {}

template <int REGISTERS>
__forceinline__ void setmaxnreg_dec() {}
template <int REGISTERS>
__forceinline__ void setmaxnreg_inc() {}

__forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  host::mbarrier_init(barrier, arrivals);
}
__forceinline__ void fence_mbarrier_init() {}
__forceinline__ void mbarrier_arrive(u32 barrier) { host::mbarrier_arrive(barrier, true); }
__forceinline__ void mbarrier_arrive_cluster(u32 barrier) { host::mbarrier_arrive(barrier, false); }
__forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  host::mbarrier_arrive_expect_tx(barrier, bytes);
}
__forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  host::mbarrier_wait(barrier, parity);
}

__forceinline__ void prefetch_tensormap(const TensorMap&) {}
__forceinline__ void cp_async_bulk_prefetch(const void* from, u32 bytes) {
  host::bulk_prefetch(from, bytes);
}
__forceinline__ void cp_async_bulk_tensor_multicast(u32 to, const TensorMap& map, int x, int y,
                                                    int z, u32 barrier, u16 blocks) {
  host::bulk_copy(to, map, 3, {x, y, z}, barrier, blocks);
}
__forceinline__ void cp_async_bulk_tensor(u32 to, const TensorMap& map, int x, int y, int z,
                                          u32 barrier) {
  host::bulk_copy(to, map, 3, {x, y, z}, barrier, 1u << host::block_rank());
}
__forceinline__ void cp_async_bulk_tensor(u32 to, const TensorMap& map, int x, int y, int z, int u,
                                          int v, u32 barrier) {
  host::bulk_copy(to, map, 5, {x, y, z, u, v}, barrier, 1u << host::block_rank());
}

__forceinline__ void cp_async_bulk_tensor_im2col(u32 to, const TensorMap& map, int c, int w, int h,
                                                 int n, int tap_w, int tap_h, u32 barrier) {
  host::bulk_copy(to, map, 4, {{c, w, h, n}, {tap_w, tap_h}}, barrier, 1u << host::block_rank());
}
__forceinline__ void cp_async_bulk_tensor_im2col_multicast(u32 to, const TensorMap& map, int c,
                                                           int w, int h, int n, int tap_w,
                                                           int tap_h, u32 barrier, u16 blocks) {
  host::bulk_copy(to, map, 4, {{c, w, h, n}, {tap_w, tap_h}}, barrier, blocks);
}
__forceinline__ void cp_async_bulk_tensor_im2col(u32 to, const TensorMap& map, int c, int w, int h,
                                                 int t, int n, int tap_w, int tap_h, int tap_t,
                                                 u32 barrier) {
  host::bulk_copy(to, map, 5, {{c, w, h, t, n}, {tap_w, tap_h, tap_t}}, barrier,
                  1u << host::block_rank());
}
__forceinline__ void cp_async_bulk_tensor_im2col_multicast(u32 to, const TensorMap& map, int c,
                                                           int w, int h, int t, int n, int tap_w,
                                                           int tap_h, int tap_t, u32 barrier,
                                                           u16 blocks) {
  host::bulk_copy(to, map, 5, {{c, w, h, t, n}, {tap_w, tap_h, tap_t}}, barrier, blocks);
}

__forceinline__ void barrier_cluster_arrive() { host::cluster_arrive(true); }
__forceinline__ void barrier_cluster_arrive_relaxed() { host::cluster_arrive(false); }
__forceinline__ void barrier_cluster_wait() { host::cluster_wait(); }
__forceinline__ u32 mapa(u32 address, u32 rank) { return host::mapa(address, rank); }
__forceinline__ void cp_async_bulk_to_cluster(u32 to, u32 from, u32 bytes, u32 barrier) {
  host::bulk_copy_to_cluster(to, from, bytes, barrier);
}
__forceinline__ void st_async(u32 to, float x, float y, u32 barrier) {
  const float values[2] = {x, y};
  host::st_async(to, values, sizeof values, barrier);
}
__forceinline__ void st_async(u32 to, const float (&x)[4], u32 barrier) {
  host::st_async(to, x, sizeof x, barrier);
}

__forceinline__ void fence_proxy_async() { host::fence_proxy_async(); }

}  // namespace gtco::ptx
