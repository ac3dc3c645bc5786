// wgmma for a CPU: each thread computes its own accumulators, when they are waited for and not
// before, so that a tile which is overwritten too early shows.
#pragma once

#include "ptx.cuh"

namespace gtco::ptx {

inline u64 wgmma_descriptor(u32 address) { return address; }
inline void wgmma_fence() {}

inline void wgmma_commit_group() {
  host::Thread& thread = host::threads[host::current];
  thread.products.push_back(std::move(thread.open_products));
  thread.open_products.clear();
}

template <int PENDING, int COUNT>
void wgmma_wait_group(float (&)[COUNT]) {
  auto& groups = host::threads[host::current].products;
  while (static_cast<int>(groups.size()) > PENDING) {
    for (const auto& product : groups.front()) product();
    groups.erase(groups.begin());
  }
}

template <class T>
T element(u32 tile, int row, int byte) {
  T value;
  std::memcpy(&value, host::shared(swizzled(tile + row * 128 + byte)), sizeof value);
  return value;
}

inline float widened(half_t x) { return cvt_f32(x); }
inline float widened(bf16_t x) { return cvt_f32(x); }
inline float widened(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000); }

// Register 4 j + i of a thread: row (warp % 4) 16 + lane / 4 + i / 2 * 8, column j 8 + lane % 4 * 2
// + i % 2.
template <class T, int N>
struct Wgmma {
  static void mma(float (&d)[N / 2], u64 a, u64 b, int accumulate) {
    float* const to = d;
    host::threads[host::current].open_products.push_back([=] {
      const int thread = host::current % host::block_threads;
      const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
      for (int i = 0; i < N / 2; ++i) {
        const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        float sum = accumulate ? to[i] : 0.0f;
        for (int byte = 0; byte < 32; byte += sizeof(T))
          sum += widened(element<T>(u32(a), row + i % 4 / 2 * 8, byte)) *
                 widened(element<T>(u32(b), column, byte));
        to[i] = sum;
      }
    });
  }
};

}  // namespace gtco::ptx
