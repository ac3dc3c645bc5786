// A convolution of patches (patches.cuh) on wgmma, which reads planes as they lie: eight pixels
// side by side are eight rows of an operand, the next eight lie a line further down, and a tap is
// an offset of where it begins.
#pragma once

#include "mma.cuh"
#include "patches.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
template <class C, class A>
class WgmmaProducts {
  using Patch = gtco::Patch<C, A>;
  using W = typename Patch::W;
  static_assert(C::TILE_H % 8 == 0 && C::CHUNKS % 2 == 0,
                "squares of 8 x 8 pixels, pairs of planes");
  static_assert(C::WARPS_M % 4 == 0 && C::WARPS_N == 1, "warpgroups have rows of their own");
  static constexpr int SQUARES = C::TILE_T * C::TILE_H * C::TILE_W / (C::WARPS_M * 16);

 public:
  // The epilogue's inputs of more columns would leave no registers.
  static constexpr int PARTS = C::BLOCK_N % 64 == 0 ? C::BLOCK_N / 64 : 1;
  static constexpr int FRAGMENTS = SQUARES * PARTS, COLUMNS = C::BLOCK_N / PARTS;
  static constexpr bool READ_LATER = true;
  static constexpr int LOOP = SQUARES * C::BLOCK_N / 2 + 72;

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

  __device__ __forceinline__ void multiply(u32 weights, u32 image) {
    const u32 a_at = image + Patch::first_pixel(row_) * 16;
    int add = !empty_;
    ptx::wgmma_fence();
#pragma unroll 1
    for (int row = 0; row < W::KERNEL_T * W::KERNEL_H; ++row) {
      const u32 a_of_row = a_at + Patch::tap(row * W::KERNEL_W) * 16;
      const u32 b_of_row = weights + row * (W::KERNEL_W * C::CHUNKS * Patch::COLUMNS * 16);
#pragma unroll
      for (int x = 0; x < W::KERNEL_W; ++x)
#pragma unroll
        for (int chunk = 0; chunk < C::CHUNKS; chunk += 2) {
#pragma unroll
          for (int i = 0; i < SQUARES; ++i) {
            const int at = Patch::tap(x) + chunk * Patch::PLANE + Patch::first_pixel(i * 64);
            ptx::Wgmma<typename C::Element, C::BLOCK_N>::mma(
                acc_[i], of_pixels(a_of_row, at * 16),
                of_weights(b_of_row, (x * C::CHUNKS + chunk) * Patch::COLUMNS * 16), add);
          }
          add = 1;
        }
    }
    ptx::wgmma_commit_group();
    empty_ = false;
  }

  __device__ __forceinline__ void wait() {
#pragma unroll
    for (int i = 0; i < SQUARES; ++i) ptx::wgmma_wait_group<0>(acc_[i]);
  }

 private:
  __device__ __forceinline__ static u64 of_pixels(u32 address, u32 offset) {
    return ptx::plane_descriptor<Patch::PLANE * 16, W::STRIDE_H * Patch::PITCH * 16>(address,
                                                                                     offset);
  }
  __device__ __forceinline__ static u64 of_weights(u32 address, u32 offset) {
    return ptx::plane_descriptor<Patch::COLUMNS * 16, 128>(address, offset);
  }

  const int row_;  // the warpgroup's first
  bool empty_ = true;
  float acc_[SQUARES][C::BLOCK_N / 2];
};

// Config as of convolve_patches; WARPS_M are those of whole warpgroups.
template <class C, class A, class B, class Functor>
__device__ __forceinline__ void conv_wgmma(const A& a, const B& b, const Functor& functor) {
  convolve_patches<C, WgmmaProducts<C, A>>(a, b, functor);
}
#endif

}  // namespace gtco
