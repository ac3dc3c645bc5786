// A convolution of patches (patches.cuh) on mma.sync.
#pragma once

#include "mma.cuh"
#include "patches.cuh"

namespace gtco {

template <class C, class A>
class MmaProducts {
  using Mma = gtco::Mma<typename C::Element, is_exact<C>>;
  using Patch = gtco::Patch<C, A>;
  static constexpr int WARP_M = C::TILE_T * C::TILE_H * C::TILE_W / C::WARPS_M;
  static constexpr int WARP_N = C::BLOCK_N / C::WARPS_N;
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a warp's tile is made of 16 x 16 pieces");
  static constexpr int MI = WARP_M / 16, NI = WARP_N / 8;
  // 128 roundings of an exact sum and more.
  static constexpr bool LONG = Patch::TAPS * A::CHANNELS > 1024;

 public:
  static constexpr int FRAGMENTS = MI, PARTS = 1, COLUMNS = WARP_N;
  static constexpr int LOOP = Mma::PARTS * 4 * (MI * NI + MI + NI / 2) + 44;

  // `zeros_at` are 16 bytes of shared memory.
  __device__ __forceinline__ explicit MmaProducts(u32 zeros_at)
      : zeros_at_(zeros_at),
        row_(threadIdx.x / 32 / C::WARPS_N * WARP_M),
        column_(threadIdx.x / 32 % C::WARPS_N * WARP_N) {}

  __device__ __forceinline__ int row(int i) const { return row_ + i * 16; }
  __device__ __forceinline__ int column(int) const { return column_; }
  __device__ __forceinline__ static void show() {}
  __device__ __forceinline__ void wait() const {}

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j)
#pragma unroll
        for (int e = 0; e < Mma::PARTS * 4; ++e) acc_[i][j][e / 4][e % 4] = 0.0f;
  }

  __device__ __forceinline__ void sums(int i, float (&to)[COLUMNS / 2]) const {
#pragma unroll
    for (int e = 0; e < NI * 4; ++e) to[e] = Mma::total(acc_[i][e / 4], e % 4);
  }

  template <class Beside>
  __device__ __forceinline__ void multiply(u32 weights, u32 image, Beside beside) {
    // Where a lane's row of ldmatrix begins, of A's fragments ((0, 0), (8, 0), (0, 1), (8, 1) by
    // rows and chunks) and of two of B's ((0, 0), (0, 1), (8, 0), (8, 1)).
    using W = typename Patch::W;
    const int lane = threadIdx.x % 32;
    const int a_half = lane / 16, b_half = lane / 8 % 2;
    const int a_lane = Patch::first_pixel(row_ + lane / 8 % 2 * 8 + lane % 8);
    const int b_lane = b_half * C::BLOCK_N + column_ + lane / 16 * 8 + lane % 8;
    const u32 b_at = weights + b_lane * 16;
    if constexpr (C::CHUNKS % 2 == 0) {
      const u32 a_at = image + (a_lane + a_half * Patch::PLANE) * 16;
#pragma unroll 1
      for (int row = 0; row < Patch::ROWS; ++row) {
        beside(row);
        const u32 a_of_row = a_at + Patch::tap(row * W::KERNEL_W) * 16;
        const u32 b_of_row = b_at + row * (W::KERNEL_W * C::CHUNKS * C::BLOCK_N * 16);
#pragma unroll
        for (int x = 0; x < W::KERNEL_W; ++x)
#pragma unroll
          for (int chunk = 0; chunk < C::CHUNKS; chunk += 2)
            multiply(a_of_row + (Patch::tap(x) + chunk * Patch::PLANE) * 16,
                     b_of_row + (x * C::CHUNKS + chunk) * C::BLOCK_N * 16, false, false);
      }
    } else {
      const u32 a_at = image + a_lane * 16;
#pragma unroll 1
      for (int row = 0; row < Patch::ROWS; ++row) beside(row);
#pragma unroll
      for (int tap = 0; tap < Patch::TAPS; tap += 2) {
        const bool last = tap + 1 == Patch::TAPS;  // and alone
        const int next = last ? 0 : Patch::tap(tap + 1);
        multiply(a_at + (a_half ? next : Patch::tap(tap)) * 16, b_at + tap * C::BLOCK_N * 16,
                 last && a_half, last && b_half);
      }
    }
  }

 private:
  // Adds the products of two chunks of K. Lanes of which `a_zero` or `b_zero` is true have none.
  __device__ __forceinline__ void multiply(u32 a_at, u32 b_at, bool a_zero, bool b_zero) {
    u32 af[MI][Mma::PARTS][4], bf[NI / 2][Mma::PARTS][4];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      ptx::ldmatrix_x4(af[i][0], a_zero ? zeros_at_ : a_at + Patch::first_pixel(i * 16) * 16);
      Mma::split(af[i]);
    }
#pragma unroll
    for (int j = 0; j < NI / 2; ++j) {
      ptx::ldmatrix_x4(bf[j][0], b_zero ? zeros_at_ : b_at + j * 256);
      Mma::split(bf[j]);
    }
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j) Mma::template mma<LONG>(acc_[i][j], af[i], bf[j / 2], j % 2 * 2);
  }

  const u32 zeros_at_;
  const int row_, column_;
  float acc_[MI][NI][Mma::PARTS][4];
};

// Config as of convolve_patches.
template <class C, class A, class B, class Functor>
__device__ __forceinline__ void conv_mma(const A& a, const B& b, const Functor& functor) {
  convolve_patches<C, MmaProducts<C, A>>(a, b, functor);
}

}  // namespace gtco
