// wgmma for a CPU: the product is taken when it is waited for and not before, so that a tile which
// is overwritten too early shows.
#pragma once

#include "ptx.cuh"

namespace gtco::ptx {

template <int ROW = 128>
__forceinline__ u64 wgmma_descriptor(u32 address, u32 offset) {
  return u64(address + offset) | u64(ROW) << 32;
}
template <int LEADING>
__forceinline__ u64 rows_descriptor(u32 address, u32 offset) {
  return u64(address + offset) | u64(LEADING / 16) << 48;
}
__forceinline__ void wgmma_fence() { host::wgmma_fence(); }
__forceinline__ void wgmma_commit_group() { host::wgmma_commit(); }

template <int PENDING>
__forceinline__ void wgmma_wait_group() {
  host::wgmma_wait(PENDING);
}

template <int PENDING, int COUNT>
__forceinline__ void wgmma_wait_group(float (&)[COUNT]) {
  host::wgmma_wait(PENDING);
}
template <int PENDING, int COUNT>
__forceinline__ void wgmma_wait_group(int (&)[COUNT]) {
  host::wgmma_wait(PENDING);
}

template <class T, int N>
struct Wgmma {
  __forceinline__ static void mma(sum_t<T> (&d)[N / 2], u64 a, u64 b, int accumulate) {
    host::wgmma(d, N, a, b, false, accumulate, TYPE<T>);
  }
};

template <class T, int N>
struct WgmmaOfRows {
  __forceinline__ static void mma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    host::wgmma(d, N, a, b, true, accumulate, TYPE<T>);
  }
};

template <class T, int N, bool K_MAJOR = false>
struct WgmmaFromRegisters {
  __forceinline__ static void mma(float (&d)[N / 2], const u32 (&a)[4], u64 b, int accumulate) {
    constexpr bool BY_ROWS = !K_MAJOR && !is_same<T, float>;
    host::wgmma_from_registers(d, N, a, b, BY_ROWS, accumulate, TYPE<T>);
  }
};

}  // namespace gtco::ptx
