// A convolution on mma.sync whose blocks copy each pixel of their windows once, border included:
// all taps read it from shared memory, where a tap is an offset.
//
// A block's rows are the TILE_T x TILE_H x TILE_W results of a patch, one patch after another. What
// it holds of them and of the weights lies in planes of 16 bytes: those of a chunk of channels, a
// pixel each, and those of a chunk of K, a column each. Neighbours in a plane are in different
// banks, wherever a tap begins.
#pragma once

#include "epilogue.cuh"
#include "mma.cuh"
#include "windows.cuh"

namespace gtco {

// The window struct W, with what images lack of volumes.
template <class W, bool = is_volume<W>>
struct Volume : W {
  static constexpr int O = 1, KERNEL_T = 1, STRIDE_T = 1, BEFORE_T = 0, DILATION_T = 1;
};
template <class W>
struct Volume<W, true> : W {};

// Where the pixels of a patch lie that its windows read, and where patches do.
template <class C, class Windows>
struct Patch {
  using W = Volume<Windows>;
  static constexpr int CHUNK = 16 / sizeof(typename C::Element);  // elements
  static constexpr int CHUNKS = W::CHANNELS / CHUNK;
  static constexpr int STEPS = ceil_div(CHUNKS, C::CHUNKS);
  static constexpr int TAPS = W::KERNEL_T * W::KERNEL_H * W::KERNEL_W;
  static constexpr int DEEP = (C::TILE_T - 1) * W::STRIDE_T + (W::KERNEL_T - 1) * W::DILATION_T + 1;
  static constexpr int HIGH = (C::TILE_H - 1) * W::STRIDE_H + (W::KERNEL_H - 1) * W::DILATION_H + 1;
  static constexpr int WIDE = (C::TILE_W - 1) * W::STRIDE_W + (W::KERNEL_W - 1) * W::DILATION_W + 1;
  static constexpr int PIXELS = DEEP * HIGH * WIDE;
  // Columns a stride apart are neighbours, so that those of a tap's windows are.
  static constexpr int PHASE = ceil_div(WIDE, W::STRIDE_W), PITCH = W::STRIDE_W * PHASE;
  // The chunks of a pixel are copied side by side, into banks of their own.
  static constexpr int BANKS = 8 / min_of(C::CHUNKS, 8);
  static constexpr int PLANE = ceil_div(DEEP * HIGH * PITCH - BANKS, 8) * 8 + BANKS;
  static constexpr int DOWN = ceil_div(W::P, C::TILE_H), ACROSS = ceil_div(W::Q, C::TILE_W);
  static constexpr int FRAMES = ceil_div(W::O, C::TILE_T);

  __host__ __device__ static constexpr int column(int x) {
    return x % W::STRIDE_W * PHASE + x / W::STRIDE_W;
  }
  __host__ __device__ static constexpr int pixel(int t, int y, int x) {
    return (t * HIGH + y) * PITCH + column(x);
  }
  // Of a tap, how far it lies from the window's first pixel.
  __host__ __device__ static constexpr int tap(int at) {
    const int t = at / (W::KERNEL_H * W::KERNEL_W), y = at / W::KERNEL_W % W::KERNEL_H;
    return pixel(t * W::DILATION_T, y * W::DILATION_H, at % W::KERNEL_W * W::DILATION_W);
  }
  // Of the window of row `r`; of rows that have no bit in common, their sum is that of both.
  __host__ __device__ static constexpr int first_pixel(int r) {
    const int t = r / (C::TILE_H * C::TILE_W), y = r / C::TILE_W % C::TILE_H;
    return (t * W::STRIDE_T * HIGH + y * W::STRIDE_H) * PITCH + r % C::TILE_W;
  }

  // The first result of patch `number`.
  __device__ __forceinline__ static Pixel origin(int number) {
    Pixel at{0, number / ACROSS % DOWN * C::TILE_H, number % ACROSS * C::TILE_W, 0};
    number /= ACROSS * DOWN;
    at.z = number % FRAMES * C::TILE_T;
    at.image = number / FRAMES;
    return at;
  }
};

// Rows of a patch, from `first` on, as rows of the results.
template <class C, class Windows>
struct PatchRows {
  using W = Volume<Windows>;
  Pixel origin;
  int first;

  __device__ __forceinline__ PatchRows from(int r) const { return {origin, first + r}; }
  __device__ __forceinline__ Pixel result(int r) const {
    r += first;
    return {origin.image, origin.y + r / C::TILE_W % C::TILE_H, origin.x + r % C::TILE_W, 0,
            origin.z + r / (C::TILE_H * C::TILE_W)};
  }
  __device__ __forceinline__ static int row(const Pixel& at) {
    return ((at.image * W::O + at.z) * W::P + at.y) * W::Q + at.x;
  }
  __device__ __forceinline__ int at(int r) const { return row(result(r)); }
  __device__ __forceinline__ bool has(int r) const { return result(r).inside(W::O, W::P, W::Q); }
  __device__ __forceinline__ int some(int r) const { return has(r) ? at(r) : row(origin); }
};

// Config: Element, N (columns of a group), TILE_T, TILE_H, TILE_W (powers of two, TILE_W at least
// 8), BLOCK_N, CHUNKS (16 bytes of channels a stage), WARPS_M, WARPS_N, STAGES, PATCHES, BLOCKS
// (that share them), WIDTH (of the epilogue's lanes), and EXACT and GROUPED as of gemm_mma. B are
// the weights, K-major.
template <class C, class A, class B, class Functor>
__device__ __forceinline__ void conv_mma(const A& a, const B& b, const Functor& functor) {
  using Element = typename C::Element;
  using Mma = gtco::Mma<Element, is_exact<C>>;
  using Patch = gtco::Patch<C, A>;
  constexpr int THREADS = C::WARPS_M * C::WARPS_N * 32;
  constexpr int BLOCK_M = C::TILE_T * C::TILE_H * C::TILE_W;
  constexpr int WARP_M = BLOCK_M / C::WARPS_M, WARP_N = C::BLOCK_N / C::WARPS_N;
  static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "a warp's tile is made of 16 x 16 pieces");
  static_assert(C::TILE_W % 8 == 0, "eight rows of a fragment are neighbours");
  static_assert(Functor::ROW_VALUES == 0, "no row of a patch is prepared for");
  constexpr int MI = WARP_M / 16, NI = WARP_N / 8;
  constexpr int STEPS = Patch::STEPS, K = Patch::TAPS * A::CHANNELS;
  constexpr bool LONG = K > 1024;  // 128 roundings of an exact sum and more
  constexpr bool KEEPS_WEIGHTS = STEPS == 1;
  constexpr int COLUMNS = C::BLOCK_N + 1;                     // of a plane of weights
  constexpr int WEIGHTS = Patch::TAPS * C::CHUNKS * COLUMNS;  // of a step, in 16 bytes
  constexpr int IMAGE = C::CHUNKS * Patch::PLANE;             // likewise

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 weights_at = ptx::shared_address(smem);  // ([STAGES,] TAPS, CHUNKS, COLUMNS)
  const u32 image_at = weights_at + (KEEPS_WEIGHTS ? 1 : C::STAGES) * WEIGHTS * 16;  // (STAGES, ..)
  const u32 zeros_at = image_at + C::STAGES * IMAGE * 16;                            // 16 bytes

  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int warp_m = warp / C::WARPS_N * WARP_M, warp_n = warp % C::WARPS_N * WARP_N;
  const int n0 = blockIdx.y * C::BLOCK_N, group = blockIdx.z;
  const int first_column = (IsGrouped<C>::value ? group * C::N : 0) + n0;
  const int end_column = (IsGrouped<C>::value ? group * C::N : 0) + C::N;

  // A thread has a chunk of one column, and goes from tap to tap.
  const auto copy_weights = [&](u32 to, int step) {
#pragma unroll 2
    for (int item = thread; item < C::BLOCK_N * C::CHUNKS; item += THREADS) {
      const int n = item / C::CHUNKS, in_step = item % C::CHUNKS;
      const int chunk = step * C::CHUNKS + in_step;
      const bool valid = n0 + n < C::N && chunk < Patch::CHUNKS;
      const Element* from = valid ? b.at(group, n0 + n, chunk * Patch::CHUNK) : b.base;
      // Where a lane has eight columns side by side, of 32, column 8 t + 2 j + e stands at
      // 8 j + 2 t + e.
      const int place = C::WIDTH == 8 ? (n & ~31) | (n & 6) << 2 | (n & 24) >> 2 | (n & 1) : n;
      const u32 at = to + (in_step * COLUMNS + place) * 16;
#pragma unroll 9
      for (int tap = 0; tap < Patch::TAPS; ++tap)
        ptx::cp_async<16>(at + tap * (C::CHUNKS * COLUMNS * 16),
                          from + (valid ? tap * A::CHANNELS : 0), valid);
    }
  };
  const auto copy_image = [&](u32 to, int patch, int step) {
    const Pixel origin = Patch::origin(patch);
    using W = typename Patch::W;
#pragma unroll 4
    for (int item = thread; item < Patch::PIXELS * C::CHUNKS; item += THREADS) {
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
  // What this block copies as its number `s`, if there is as much.
  const auto copy = [&](int s) {
    const int patch = blockIdx.x + s / STEPS * C::BLOCKS;
    if (patch < C::PATCHES) {
      copy_image(image_at + s % C::STAGES * IMAGE * 16, patch, s % STEPS);
      if constexpr (!KEEPS_WEIGHTS)
        copy_weights(weights_at + s % C::STAGES * WEIGHTS * 16, s % STEPS);
    }
    ptx::cp_async_commit();
  };

  ptx::griddepcontrol_launch_dependents();
  if (thread < 4) reinterpret_cast<u32*>(smem + (zeros_at - weights_at))[thread] = 0;
  if constexpr (KEEPS_WEIGHTS && B::CONSTANT) copy_weights(weights_at, 0);
  ptx::griddepcontrol_wait();
  if constexpr (KEEPS_WEIGHTS && !B::CONSTANT) copy_weights(weights_at, 0);
#pragma unroll
  for (int s = 0; s < C::STAGES - 1; ++s) copy(s);

  // Where a lane's row of ldmatrix begins, of A's fragments ((0, 0), (8, 0), (0, 1), (8, 1) by rows
  // and chunks) and of two of B's ((0, 0), (0, 1), (8, 0), (8, 1)).
  const int a_row = warp_m + lane / 8 % 2 * 8 + lane % 8, a_half = lane / 16;
  const int b_column = warp_n + lane / 16 * 8 + lane % 8, b_half = lane / 8 % 2;
  const int a_lane = Patch::first_pixel(a_row), b_lane = b_half * COLUMNS + b_column;

  float acc[MI][NI][Mma::PARTS][4] = {};
  // Adds the products of two chunks of K. Lanes of which `a_zero` or `b_zero` is true have none.
  const auto multiply = [&](u32 a_at, u32 b_at, bool a_zero, bool b_zero) {
    u32 af[MI][Mma::PARTS][4], bf[NI / 2][Mma::PARTS][4];
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      ptx::ldmatrix_x4(af[i][0], a_zero ? zeros_at : a_at + Patch::first_pixel(i * 16) * 16);
      Mma::split(af[i]);
    }
#pragma unroll
    for (int j = 0; j < NI / 2; ++j) {
      ptx::ldmatrix_x4(bf[j][0], b_zero ? zeros_at : b_at + j * 256);
      Mma::split(bf[j]);
    }
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j) Mma::template mma<LONG>(acc[i][j], af[i], bf[j / 2], j % 2 * 2);
  };
  const auto multiply_stage = [&](u32 weights, u32 image) {
    using W = typename Patch::W;
    const u32 b_at = weights + b_lane * 16;
    if constexpr (C::CHUNKS % 2 == 0) {
      const u32 a_at = image + (a_lane + a_half * Patch::PLANE) * 16;
#pragma unroll 1
      for (int row = 0; row < W::KERNEL_T * W::KERNEL_H; ++row) {
        const u32 a_of_row = a_at + Patch::tap(row * W::KERNEL_W) * 16;
        const u32 b_of_row = b_at + row * (W::KERNEL_W * C::CHUNKS * COLUMNS * 16);
#pragma unroll
        for (int x = 0; x < W::KERNEL_W; ++x)
#pragma unroll
          for (int chunk = 0; chunk < C::CHUNKS; chunk += 2)
            multiply(a_of_row + (Patch::tap(x) + chunk * Patch::PLANE) * 16,
                     b_of_row + (x * C::CHUNKS + chunk) * COLUMNS * 16, false, false);
      }
    } else {
      const u32 a_at = image + a_lane * 16;
#pragma unroll
      for (int tap = 0; tap < Patch::TAPS; tap += 2) {
        const bool last = tap + 1 == Patch::TAPS;  // and alone
        const int next = last ? 0 : Patch::tap(tap + 1);
        multiply(a_at + (a_half ? next : Patch::tap(tap)) * 16, b_at + tap * COLUMNS * 16,
                 last && a_half, last && b_half);
      }
    }
  };
  const auto epilogue_of = [&](int patch, int i) {
    const PatchRows<C, A> rows{Patch::origin(patch), warp_m + i * 16};
    return FragmentEpilogue<C::WIDTH, WARP_N, C::N % C::BLOCK_N == 0, Functor, PatchRows<C, A>>(
        functor, rows, first_column + warp_n, end_column);
  };
  // What differs by column alone is fetched once; of rows, that of a fragment ahead of its turn;
  // where the loop leaves registers for it.
  using Fetched = typename decltype(epilogue_of(0, 0))::Fetched;
  constexpr int LOOP = Mma::PARTS * 4 * (MI * NI + MI + NI / 2) + 44;  // registers
  constexpr int FREE = min_of(255, 65536 / THREADS) - LOOP;
  constexpr bool AHEAD = FREE * 4 >= static_cast<int>(sizeof(Fetched));
  constexpr bool BY_ROW = Functor::INPUTS_BY_ROW;
  Fetched fetched;
  if constexpr (AHEAD && !BY_ROW) fetched = epilogue_of(blockIdx.x, 0).fetch();
  const auto finish = [&](int patch) {
#pragma unroll
    for (int i = 0; i < MI; ++i) {
      if constexpr (!AHEAD) fetched = epilogue_of(patch, i).fetch();
      const Fetched here = fetched;
      if constexpr (AHEAD && BY_ROW) {
        if (i + 1 < MI) fetched = epilogue_of(patch, i + 1).fetch();
      }
      float sums[NI * 4];
#pragma unroll
      for (int e = 0; e < NI * 4; ++e) sums[e] = Mma::total(acc[i][e / 4], e % 4);
      epilogue_of(patch, i).run(nullptr, here, sums);
    }
  };

#pragma unroll 1
  for (int patch = blockIdx.x, s = 0; patch < C::PATCHES; patch += C::BLOCKS) {
#pragma unroll
    for (int i = 0; i < MI; ++i)
#pragma unroll
      for (int j = 0; j < NI; ++j)
#pragma unroll
        for (int e = 0; e < Mma::PARTS * 4; ++e) acc[i][j][e / 4][e % 4] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step, ++s) {
      if constexpr (C::STAGES == 1) {
        __syncthreads();  // the stage before is used up
        copy(s);
        ptx::cp_async_wait<0>();
        __syncthreads();
      } else {
        ptx::cp_async_wait<C::STAGES - 2>();
        __syncthreads();
        copy(s + C::STAGES - 1);
      }
      if constexpr (AHEAD && BY_ROW) {
        if (step + 1 == STEPS) fetched = epilogue_of(patch, 0).fetch();
      }
      const int slot = s % C::STAGES;
      multiply_stage(weights_at + (KEEPS_WEIGHTS ? 0 : slot * WEIGHTS * 16),
                     image_at + slot * IMAGE * 16);
    }
    finish(patch);
  }
  ptx::cp_async_wait<0>();
}

}  // namespace gtco
