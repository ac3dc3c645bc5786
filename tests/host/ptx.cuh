// The device library's ptx.cuh for a CPU: each instruction's meaning, from the PTX ISA manual 9.0.
// Copies by cp.async arrive as late as the waits allow, so that a wait too few shows.
#pragma once

#include "cuda_host.h"
#include "types.cuh"

namespace gtco {

alignas(1024) unsigned char smem[256 * 1024];

namespace ptx {

inline float cvt_f32(half_t x) { return static_cast<float>(bit_cast_to<_Float16>(x.bits)); }
inline float cvt_f32(bf16_t x) { return __uint_as_float(u32(x.bits) << 16); }
inline half_t cvt_f16(float x) { return {bit_cast_to<u16>(static_cast<_Float16>(x))}; }
inline bf16_t cvt_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class T>
u32 cvt_pack(float low, float high) {
  if constexpr (is_same<T, half_t>) return cvt_f16(low).bits | u32(cvt_f16(high).bits) << 16;
  return cvt_bf16(low).bits | u32(cvt_bf16(high).bits) << 16;
}

inline float ex2(float x) { return std::exp2(x); }
inline float max_nan(float x, float y) { return x != x || x > y ? x : y; }
inline float min_nan(float x, float y) { return x != x || x < y ? x : y; }

inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const unsigned char*>(p) - smem);
}

// Lane l gets elements (l / 4, l % 4 * 2) and the next of each matrix; lanes 8 j to 8 j + 7 give
// the rows of matrix j.
inline void ldmatrix(u32 (&r)[4], u32 address, bool trans) {
  if (address % 16) std::abort();
  const int lane = host::current % 32;
  host::shown<u32>(lane) = address;
  host::meet(host::warp());
  for (int j = 0; j < 4; ++j) {
    u16 pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = trans ? lane % 4 * 2 + e : lane / 4;
      const int column = trans ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], smem + host::shown<u32>(j * 8 + row) + column * 2, 2);
    }
    r[j] = pair[0] | u32(pair[1]) << 16;
  }
  host::meet(host::warp());
}
inline void ldmatrix_x4(u32 (&r)[4], u32 address) { ldmatrix(r, address, false); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { ldmatrix(r, address, true); }

template <int BYTES>
void cp_async(u32 to_shared, const void* from_global, bool valid) {
  if (to_shared % BYTES || reinterpret_cast<u64>(from_global) % BYTES) std::abort();
  host::threads[host::current].open.push_back(
      {smem + to_shared, valid ? from_global : nullptr, BYTES});
}

inline void cp_async_commit() {
  host::Thread& thread = host::threads[host::current];
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

template <int PENDING>
void cp_async_wait() {
  auto& groups = host::threads[host::current].groups;
  while (static_cast<int>(groups.size()) > PENDING) {
    for (const host::Copy& copy : groups.front()) {
      if (copy.from) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
    groups.erase(groups.begin());
  }
}

template <class T>
float unpack(u32 pair, int which) {
  return cvt_f32(T{static_cast<u16>(which ? pair >> 16 : pair)});
}

// A: register i is rows (i % 2) * 8 + l / 4, k (i / 2) * 8 + l % 4 * 2; B: register i is k
// i * 8 + l % 4 * 2, column l / 4; D: registers 2 i are rows i * 8 + l / 4, column l % 4 * 2.
template <class T>
void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragment {
    u32 a[4], b[2];
  };
  const int lane = host::current % 32;
  host::shown<Fragment>(lane) = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::meet(host::warp());
  for (int j = 0; j < 4; ++j) {
    const int row = j / 2 * 8 + lane / 4, column = lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2;
      const auto& left = host::shown<Fragment>(row % 8 * 4 + from);
      const auto& right = host::shown<Fragment>(column * 4 + from);
      d[j] += unpack<T>(left.a[row / 8 + k / 8 * 2], k % 2) * unpack<T>(right.b[k / 8], k % 2);
    }
  }
  host::meet(host::warp());
}

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void prefetch_l1(const void*) {}

}  // namespace ptx
}  // namespace gtco
