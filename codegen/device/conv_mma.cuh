// A convolution of patches (patches.cuh) on mma.sync, whose threads copy pixels and weights.
#pragma once

#include "mma.cuh"
#include "patches.cuh"

namespace gtco {

// What a stage of shared memory holds where threads copy: planes of 16 bytes, those of a chunk of
// channels, a pixel each, and those of a chunk of K, a column each. Neighbours in a plane are in
// different banks, wherever a tap begins.
template <class C, class Windows>
struct PatchPlanes : Patch<C, Windows, true> {
  using Base = Patch<C, Windows, true>;
  static constexpr int STEPS = ceil_div(Base::CHUNKS, C::CHUNKS);
  // The chunks of a pixel are copied side by side, into banks of their own.
  static constexpr int BANKS = 8 / min_of(C::CHUNKS, 8);
  static constexpr int PLANE =
      ceil_div(Base::DEEP * Base::HIGH * Base::PITCH - BANKS, 8) * 8 + BANKS;
  // In 16 bytes.
  static constexpr int WEIGHTS = Base::TAPS * C::CHUNKS * C::BLOCK_N;  // (TAPS, CHUNKS, BLOCK_N)
  static constexpr int IMAGE = C::CHUNKS * PLANE;                      // (CHUNKS, pixels)
};

template <class C, class A>
class MmaProducts {
  using Mma = gtco::Mma<typename C::Element, is_exact<C>>;
  using Patch = PatchPlanes<C, A>;
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

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j)
#pragma unroll
        for (int e = 0; e < Mma::PARTS * 4; ++e) acc_[i][j][e / 4][e % 4] = 0;
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
  typename Mma::Sum acc_[MI][NI][Mma::PARTS][4];
};

// Config: Element, N (columns of a group), TILE_T, TILE_H, TILE_W (powers of two, TILE_W at least
// 8), BLOCK_N, CHUNKS (16 bytes of channels a stage), WARPS_M, WARPS_N, STAGES, KEEPS_WEIGHTS
// (those of all channels, else a stage has its own), PATCHES, BLOCKS (that share them), WIDTH (of
// the epilogue's lanes), and EXACT and GROUPED as of gemm_mma. B are the weights, K-major.
template <class C, class A, class B, class Functor>
__device__ __forceinline__ void conv_mma(const A& a, const B& b, const Functor& functor) {
  using Products = MmaProducts<C, A>;
  using Element = typename C::Element;
  using Patch = PatchPlanes<C, A>;
  constexpr int THREADS = C::WARPS_M * C::WARPS_N * 32;
  static_assert(C::TILE_W % 8 == 0, "eight rows of a fragment are neighbours");
  constexpr int STEPS = Patch::STEPS;
  constexpr bool KEEPS_WEIGHTS = C::KEEPS_WEIGHTS;

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 weights_at = ptx::shared_address(smem);  // (STEPS or STAGES, TAPS, CHUNKS, BLOCK_N)
  const u32 image_at = weights_at + (KEEPS_WEIGHTS ? STEPS : C::STAGES) * Patch::WEIGHTS * 16;
  const u32 zeros_at = image_at + C::STAGES * Patch::IMAGE * 16;  // 16 bytes

  const int thread = threadIdx.x;
  const int n0 = in_order(blockIdx.y, gridDim.y) * C::BLOCK_N;
  const int group = in_order(blockIdx.z, gridDim.z);

  // A thread has a chunk of one column, and goes from tap to tap, of row `row` of taps. Neighbours
  // have the chunks of one line of memory and of few columns: one place in all planes is one bank.
  const auto copy_weights = [&](u32 to, int step, int row) {
    using W = typename Patch::W;
    constexpr int NEAR = min_of(C::CHUNKS, 4);
#pragma unroll 2
    for (int item = thread; item < C::BLOCK_N * C::CHUNKS; item += THREADS) {
      const int place = item / NEAR % C::BLOCK_N;
      const int in_step = item / (NEAR * C::BLOCK_N) * NEAR + item % NEAR;
      const int chunk = step * C::CHUNKS + in_step;
      // Where a lane has eight columns side by side, of 32, column 8 t + 2 j + e stands at
      // 8 j + 2 t + e.
      const int n = C::WIDTH == 8
                        ? (place & ~31) | (place & 24) >> 2 | (place & 6) << 2 | (place & 1)
                        : place;
      const bool valid = n0 + n < C::N && chunk < Patch::CHUNKS;
      const Element* from = valid ? b.at(group, n0 + n, chunk * Patch::CHUNK) : b.base;
      const u32 at = to + (in_step * C::BLOCK_N + place) * 16;
#pragma unroll
      for (int x = 0; x < W::KERNEL_W; ++x) {
        const int tap = row * W::KERNEL_W + x;
        ptx::cp_async<16>(at + tap * (C::CHUNKS * C::BLOCK_N * 16),
                          from + (valid ? tap * A::CHANNELS : 0), valid);
      }
    }
  };
  const auto copy_image = [&](u32 to, int patch, int step, int row) {
    const Pixel origin = Patch::origin(patch);
    using W = typename Patch::W;
#pragma unroll 4
    for (int item = row * THREADS + thread; item < Patch::PIXELS * C::CHUNKS;
         item += Patch::ROWS * THREADS) {
      const int pixel = item / C::CHUNKS, chunk = step * C::CHUNKS + item % C::CHUNKS;
      const int x = pixel % Patch::WIDE, y = pixel / Patch::WIDE % Patch::HIGH;
      const int t = pixel / (Patch::WIDE * Patch::HIGH);
      const Pixel at{origin.image, origin.y * W::STRIDE_H - W::BEFORE_H + y,
                     origin.x * W::STRIDE_W - W::BEFORE_W + x,
                     group * A::CHANNELS + chunk * Patch::CHUNK,
                     origin.z * W::STRIDE_T - W::BEFORE_T + t};
      const bool valid = chunk < Patch::CHUNKS && is_inside<A>(at);
      ptx::cp_async<16>(to + (item % C::CHUNKS * Patch::PLANE + Patch::pixel(t, y, x)) * 16,
                        valid ? a.pixel(at) : a.base, valid);
    }
  };
  const auto copy_all_weights = [&] {
#pragma unroll 1
    for (int at = 0; at < STEPS * Patch::ROWS; ++at)
      copy_weights(weights_at + at / Patch::ROWS * Patch::WEIGHTS * 16, at / Patch::ROWS,
                   at % Patch::ROWS);
  };
  // Part `row` of what this block copies as its number `s`, if there is as much: a part for each
  // row of taps, so that copies can go out between their products.
  const auto copy_part = [&](int s, int row) {
    const int patch = blockIdx.x + s / STEPS * C::BLOCKS;
    if (patch >= C::PATCHES) return;
    copy_image(image_at + s % C::STAGES * Patch::IMAGE * 16, patch, s % STEPS, row);
    if constexpr (!KEEPS_WEIGHTS)
      copy_weights(weights_at + s % C::STAGES * Patch::WEIGHTS * 16, s % STEPS, row);
  };
  const auto copy = [&](int s) {
#pragma unroll 1
    for (int row = 0; row < Patch::ROWS; ++row) copy_part(s, row);
    ptx::cp_async_commit();
  };

  ptx::griddepcontrol_launch_dependents();
  if (thread < 4) reinterpret_cast<u32*>(smem + (zeros_at - weights_at))[thread] = 0;
  if constexpr (KEEPS_WEIGHTS && B::CONSTANT) copy_all_weights();
  ptx::griddepcontrol_wait();
  if constexpr (KEEPS_WEIGHTS && !B::CONSTANT) copy_all_weights();
#pragma unroll
  for (int s = 0; s < C::STAGES - 1; ++s) copy(s);

  Products products(zeros_at);
  PatchEpilogue<min_of(255, 65536 / THREADS), C, A, Products, Functor> epilogue(functor, products,
                                                                                group, n0);
  epilogue.begin();

#pragma unroll 1
  for (int patch = blockIdx.x, s = 0; patch < C::PATCHES; patch += C::BLOCKS) {
    products.clear();
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step, ++s) {
      const int slot = s % C::STAGES;
      const u32 weights = weights_at + (KEEPS_WEIGHTS ? step : slot) * Patch::WEIGHTS * 16;
      const u32 image = image_at + slot * Patch::IMAGE * 16;
      if constexpr (C::STAGES == 1) {
        __syncthreads();  // the stage before is used up
        copy(s);
        ptx::cp_async_wait<0>();
      } else {
        ptx::cp_async_wait<C::STAGES - 2>();
      }
      __syncthreads();
      if (step + 1 == STEPS) epilogue.fetch(patch);
      products.multiply(weights, image, [&](int row) {
        if constexpr (C::STAGES > 1) copy_part(s + C::STAGES - 1, row);
      });
      if constexpr (C::STAGES > 1) ptx::cp_async_commit();
    }
    epilogue.finish(patch);
  }
  ptx::cp_async_wait<0>();
}

}  // namespace gtco
