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

// Whether the configuration of a kernel says P_BY_ROWS.
template <class C, class = void>
struct IsPByRows : Constant<bool, false> {};
template <class C>
struct IsPByRows<C, decltype(static_cast<void>(C::P_BY_ROWS))> : Constant<bool, C::P_BY_ROWS> {};
template <class C>
inline constexpr bool is_p_by_rows = IsPByRows<C>::value;

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

// Fragments of 16 rows x 8 k of P as wgmma takes it from registers, of a tile of squares of 32 rows
// of the result x 32 rows of K. Of the 16 a lane has two: side by side (PAIRED), or eight apart.
template <bool PAIRED>
class FragmentsOfRows {
 public:
  __device__ __forceinline__ FragmentsOfRows(int row, int lane)
      : row_(row + lane / 4 * (PAIRED ? 2 : 1)), k_(lane % 4) {}

  __device__ __forceinline__ void load(u32 (&r)[4], const unsigned char* tile, int k) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* from = tile + (k + half * 4 + k_) * 128;
      if constexpr (PAIRED) {
        const Vec<float, 2> two = gtco::load<2>(at(from, row_, half));
        r[half * 2] = __float_as_uint(two[0]), r[half * 2 + 1] = __float_as_uint(two[1]);
      } else {
        r[half * 2] = __float_as_uint(*at(from, row_, half));
        r[half * 2 + 1] = __float_as_uint(*at(from, row_ + 8, half));
      }
    }
  }

 private:
  // In a row of K, whose chunks of 16 bytes are turned by its place among eight.
  __device__ __forceinline__ const float* at(const unsigned char* from, int row, int half) const {
    const int chunk = row % 32 / 4 ^ (half * 4 + k_);
    return reinterpret_cast<const float*>(from + row / 32 * 32 * 128 + chunk * 16) + row % 4;
  }

  const int row_, k_;
};

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
  const int lane = thread % 32, row = thread / 128 * 64 + thread % 128 / 32 * 16;
  const FragmentsOfRows<C::SWAP && C::WIDTH == 2> of_rows(row, lane);

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
      if constexpr (is_p_by_rows<C>) {
        of_rows.load(p[k][0], smem + s * STAGE_BYTES, k * 8);
      } else {
        const int chunk = (2 * k + lane / 16) ^ lane % 8;
        ptx::ldmatrix_x4(p[k][0], ring + s * STAGE_BYTES + (row + lane % 16) * 128 + chunk * 16);
      }
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
