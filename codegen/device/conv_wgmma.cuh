// A convolution of patches (patches.cuh) on wgmma. Pixels come into registers by ldmatrix, which
// reads eight neighbours at once wherever they begin; wgmma itself would read two lines of 128
// bytes for them. Weights it reads from their planes as they lie.
#pragma once

#include "mma.cuh"
#include "patches.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// PART columns of the results go through the epilogue at a time.
template <class C, class A, int PART>
class WgmmaProducts {
  using Patch = gtco::Patch<C, A>;
  using W = typename Patch::W;
  static_assert(C::TILE_H % 8 == 0 && C::CHUNKS % 2 == 0,
                "squares of 8 x 8 pixels, pairs of planes");
  static_assert(C::WARPS_M % 4 == 0 && C::WARPS_N == 1, "warpgroups have rows of their own");
  static constexpr int SQUARES = C::TILE_T * C::TILE_H * C::TILE_W / (C::WARPS_M * 16);
  static constexpr int PAIRS = C::CHUNKS / 2, STEPS = W::KERNEL_W * PAIRS;  // of a row of taps
  // Of pixels in registers: the products of all but one go on while it is filled. Short ones end
  // before another has come.
  static constexpr int BUFFERS = STEPS % 3 == 0 && SQUARES * C::BLOCK_N < 128 ? 3 : 2;

 public:
  static constexpr int PARTS = C::BLOCK_N % PART == 0 ? C::BLOCK_N / PART : 1;
  static constexpr int FRAGMENTS = SQUARES * PARTS, COLUMNS = C::BLOCK_N / PARTS;
  static constexpr int LOOP = SQUARES * (C::BLOCK_N / 2 + BUFFERS * 4) + 56;

  __device__ __forceinline__ explicit WgmmaProducts(u32)
      : row_(ptx::uniform(threadIdx.x / 128) * SQUARES * 64) {}

  __device__ __forceinline__ int row(int i) const {
    return row_ + i / PARTS * 64 + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  }
  __device__ __forceinline__ int column(int i) const { return i % PARTS * COLUMNS; }
  __device__ __forceinline__ void clear() { empty_ = true; }
  __device__ __forceinline__ static void show() { ptx::fence_proxy_async(); }

  __device__ __forceinline__ void sums(int i, float (&to)[COLUMNS / 2]) const {
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; ++e) to[e] = acc_[i / PARTS][i % PARTS * (COLUMNS / 2) + e];
  }

  template <class Beside>
  __device__ __forceinline__ void multiply(u32 weights, u32 image, Beside beside) {
    // Where a lane's row of ldmatrix begins, of (0, 0), (8, 0), (0, 1), (8, 1) by rows and chunks.
    const int lane = threadIdx.x % 32, row_of_lane = threadIdx.x % 128 / 32 * 16 + lane % 16;
    const u32 a_at =
        image + (Patch::first_pixel(row_ + row_of_lane) + lane / 16 * Patch::PLANE) * 16;
    u32 pixels[BUFFERS][SQUARES][4];
    int add = !empty_;
#pragma unroll 1
    for (int row = 0; row < Patch::ROWS; ++row) {
      const u32 a_of_row = a_at + Patch::tap(row * W::KERNEL_W) * 16;
      const u32 b_of_row = weights + row * (W::KERNEL_W * C::CHUNKS * C::BLOCK_N * 16);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int x = step / PAIRS, chunk = step % PAIRS * 2;
        u32(&now)[SQUARES][4] = pixels[step % BUFFERS];
        // The last products that had these registers are done.
        if (step == 0 && STEPS % BUFFERS != 0) {
          ptx::wgmma_wait_group<0>();
        } else {
          ptx::wgmma_wait_group<BUFFERS - 1>();
        }
#pragma unroll
        for (int i = 0; i < SQUARES; ++i) {
          const int at = Patch::tap(x) + chunk * Patch::PLANE + Patch::first_pixel(i * 64);
          ptx::ldmatrix_x4(now[i], a_of_row + at * 16);
        }
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < SQUARES; ++i)
          ptx::WgmmaFromRegisters<typename C::Element, C::BLOCK_N, true>::mma(
              acc_[i], now[i], of_weights(b_of_row, (x * C::CHUNKS + chunk) * C::BLOCK_N * 16),
              add);
        ptx::wgmma_commit_group();
        add = 1;
      }
      beside(row);  // the last products are under way
    }
    empty_ = false;
  }

  __device__ __forceinline__ void wait() {
#pragma unroll
    for (int i = 0; i < SQUARES; ++i) ptx::wgmma_wait_group<0>(acc_[i]);
  }

 private:
  __device__ __forceinline__ static u64 of_weights(u32 address, u32 offset) {
    return ptx::plane_descriptor<C::BLOCK_N * 16, 128>(address, offset);
  }

  const int row_;  // the warpgroup's first
  bool empty_ = true;
  float acc_[SQUARES][C::BLOCK_N / 2];
};

// Config as of convolve_patches; WARPS_M are those of whole warpgroups.
template <class C, class A, class B, class Functor>
__device__ __forceinline__ void conv_wgmma(const A& a, const B& b, const Functor& functor) {
  constexpr int PART = Functor::ROW_STATS ? STATS_CHUNK : 32;
  convolve_patches<C, WgmmaProducts<C, A, PART>>(a, b, functor);
}
#endif

}  // namespace gtco
