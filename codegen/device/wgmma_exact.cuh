// Products of floats on wgmma as good as fp32's, of two tf32 for each (mma.cuh).
//
// P goes through registers, where it is split. Of Q, which wgmma reads from shared memory alone, a
// tile stays as it came, for the tensor core looks at the high part only, and the warps write a
// second with what that leaves over. They write the next step's while the tensor cores multiply:
// tiles of three steps, for a warp may be one step ahead of another that reads.
#pragma once

#include "mma.cuh"
#include "ring.cuh"
#include "vector.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
constexpr int LOW_TILES = 3;

// What the tensor core does not see of the floats of a tile, each where it was. The half rounds
// what it sees of that.
template <int BYTES, int THREADS>
__device__ __forceinline__ void write_low_parts(unsigned char* to, const unsigned char* from,
                                                int thread) {
#pragma unroll 2
  for (int at = thread * 16; at < BYTES; at += THREADS * 16) {
    Vec<float, 4> x = load<4>(reinterpret_cast<const float*>(from + at));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float high = __uint_as_float(__float_as_uint(x[i]) & TF32_BITS);
      x[i] = __uint_as_float(__float_as_uint(x[i] - high) + HALF_TF32);
    }
    store<4>(reinterpret_cast<float*>(to + at), x);
  }
}

// acc = p q^T over `steps` stages of the ring at `smem`, behind which lie the tiles of low parts;
// all of a block's consumers. Their warps count on the barrier `ready`, and `release(slot)` hands a
// stage back. Config: as of gemm_wgmma.
template <class C, class Release>
__device__ __forceinline__ void multiply_exactly(float (&acc)[C::BLOCK_Q / 2], unsigned char* smem,
                                                 u32 full, u32 ready, int steps, int thread,
                                                 const Release& release) {
  using Mma = gtco::Mma<typename C::Element, true>;
  using Product = ptx::WgmmaFromRegisters<typename C::Element, C::BLOCK_Q>;
  static_assert(C::ATOMS == 1 && C::DEPTH == 0, "fragments of one step find room");
  constexpr int P_BYTES = C::BLOCK_P * 128, Q_BYTES = C::BLOCK_Q * 128;
  constexpr int STAGE_BYTES = P_BYTES + Q_BYTES, KS = 4;  // of 8 floats
  const u32 ring = ptx::shared_address(smem);
  const int lane = thread % 32, row = thread / 128 * 64 + thread % 128 / 32 * 16 + lane % 16;

  const auto write_low = [&](int step, const RingPlace<C::STAGES>& place) {
    ptx::mbarrier_wait(full + 8 * place.slot, place.phase);
    write_low_parts<Q_BYTES, C::BLOCK_P * 2>(
        smem + C::STAGES * STAGE_BYTES + step % LOW_TILES * Q_BYTES,
        smem + place.slot * STAGE_BYTES + P_BYTES, thread);
    ptx::fence_proxy_async();  // the tensor cores read it
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ready);
  };

  float low[C::BLOCK_Q / 2] = {}, high[C::BLOCK_Q / 2] = {};
  RingPlace<C::STAGES> from{0, 0};
  if (steps > 0) write_low(0, from);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int s = from.slot;
    u32 p[KS][Mma::PARTS][4];  // (16, 32) of this warp as A fragments
#pragma unroll
    for (int k = 0; k < KS; ++k) {
      const int chunk = (2 * k + lane / 16) ^ lane % 8;
      ptx::ldmatrix_x4(p[k][0], ring + s * STAGE_BYTES + row * 128 + chunk * 16);
      Mma::split(p[k]);
#pragma unroll
      for (u32& below : p[k][1]) below += HALF_TF32;
    }
    ptx::mbarrier_wait(ready, step & 1);
    const u32 q = ring + s * STAGE_BYTES + P_BYTES;                                 // (BLOCK_Q, 32)
    const u32 q_low = ring + C::STAGES * STAGE_BYTES + step % LOW_TILES * Q_BYTES;  // (BLOCK_Q, 32)
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < KS; ++k) Product::mma(low, p[k][1], ptx::wgmma_descriptor(q, k * 32), 1);
#pragma unroll
    for (int k = 0; k < KS; ++k)
      Product::mma(low, p[k][0], ptx::wgmma_descriptor(q_low, k * 32), 1);
#pragma unroll
    for (int k = 0; k < KS; ++k)
      Product::mma(high, p[k][0], ptx::wgmma_descriptor(q, k * 32), k > 0);
    ptx::wgmma_commit_group();
    from.advance();
    if (step + 1 < steps) write_low(step + 1, from);
    ptx::wgmma_wait_group<0>(low);
    ptx::wgmma_wait_group<0>(high);
    release(s);
#pragma unroll
    for (int i = 0; i < C::BLOCK_Q / 2; ++i) acc[i] += high[i];
  }
#pragma unroll
  for (int i = 0; i < C::BLOCK_Q / 2; ++i) acc[i] = Mma::total(acc[i], low[i]);
}
#endif

}  // namespace gtco
