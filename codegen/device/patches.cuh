// A convolution whose blocks copy each pixel of their windows once, border included: all taps read
// it from shared memory, where a tap is an offset. What multiplies there is `Products`.
//
// A block's rows are the TILE_T x TILE_H x TILE_W results of a patch, one patch after another. What
// it holds of them and of the weights lies in planes of 16 bytes: those of a chunk of channels, a
// pixel each, and those of a chunk of K, a column each. Neighbours in a plane are in different
// banks, wherever a tap begins.
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
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
  static constexpr int ROWS = W::KERNEL_T * W::KERNEL_H, TAPS = ROWS * W::KERNEL_W;
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
  // The result at row `r`: rows are squares of 8 x 8 neighbours, or of fewer lines in a low patch,
  // so that what 64 of them read lies at even distances.
  static constexpr int SIDE = min_of(8, C::TILE_H);
  __host__ __device__ static constexpr int x_of(int r) {
    return r % 8 + r / (8 * SIDE) % (C::TILE_W / 8) * 8;
  }
  __host__ __device__ static constexpr int y_of(int r) {
    return r / 8 % SIDE + r / (SIDE * C::TILE_W) % (C::TILE_H / SIDE) * SIDE;
  }
  __host__ __device__ static constexpr int t_of(int r) { return r / (C::TILE_H * C::TILE_W); }
  // Of the window of row `r`; of rows that have no bit in common, their sum is that of both.
  __host__ __device__ static constexpr int first_pixel(int r) {
    return (t_of(r) * W::STRIDE_T * HIGH + y_of(r) * W::STRIDE_H) * PITCH + x_of(r);
  }

  // What a stage of shared memory holds, in 16 bytes.
  static constexpr int WEIGHTS = TAPS * C::CHUNKS * C::BLOCK_N;  // (TAPS, CHUNKS, BLOCK_N)
  static constexpr int IMAGE = C::CHUNKS * PLANE;                // (CHUNKS, pixels)

  // The first result of the patch that comes as `number`.
  __device__ __forceinline__ static Pixel origin(int number) {
    number = in_order(number, C::PATCHES);
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
    using Patch = gtco::Patch<C, Windows>;
    r += first;
    return {origin.image, origin.y + Patch::y_of(r), origin.x + Patch::x_of(r), 0,
            origin.z + Patch::t_of(r)};
  }
  __device__ __forceinline__ static int row(const Pixel& at) {
    return ((at.image * W::O + at.z) * W::P + at.y) * W::Q + at.x;
  }
  __device__ __forceinline__ int at(int r) const { return row(result(r)); }
  __device__ __forceinline__ bool has(int r) const { return result(r).inside(W::O, W::P, W::Q); }
  __device__ __forceinline__ int some(int r) const { return has(r) ? at(r) : row(origin); }
  // Of 2 x 8 pixels, which 16 rows are; they divide the lines of an image.
  __device__ __forceinline__ int box() const {
    const Pixel at = result(0);
    return ((at.image * W::O + at.z) * (W::P / 2) + at.y / 2) * (W::Q / 8) + at.x / 8;
  }
};

// Config: Element, N (columns of a group), TILE_T, TILE_H, TILE_W (powers of two, TILE_W at least
// 8), BLOCK_N, CHUNKS (16 bytes of channels a stage), WARPS_M, WARPS_N, STAGES, KEEPS_WEIGHTS
// (those of all channels, else a stage has its own), PATCHES, BLOCKS (that share them), WIDTH (of
// the epilogue's lanes), and EXACT and GROUPED as of gemm_mma. B are the weights, K-major.
//
// Products have FRAGMENTS of 16 rows x COLUMNS columns, of which PARTS have the same rows, and the
// first `row` and `column` of each. They `clear` their sums, `show` a thread's copies to what
// multiplies, `multiply` the weights and pixels of a stage, which they have read when they `wait`,
// call what they are given beside each row of taps, and give the `sums` of a fragment. LOOP are the
// registers that a thread needs for it.
template <class C, class Products, class A, class B, class Functor>
__device__ __forceinline__ void convolve_patches(const A& a, const B& b, const Functor& functor) {
  using Element = typename C::Element;
  using Patch = gtco::Patch<C, A>;
  constexpr int THREADS = C::WARPS_M * C::WARPS_N * 32;
  static_assert(C::TILE_W % 8 == 0, "eight rows of a fragment are neighbours");
  static_assert(Functor::ROW_VALUES == 0, "no row of a patch is prepared for");
  constexpr int STEPS = Patch::STEPS;
  constexpr bool KEEPS_WEIGHTS = C::KEEPS_WEIGHTS;

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 weights_at = ptx::shared_address(smem);  // (STEPS or STAGES, TAPS, CHUNKS, BLOCK_N)
  const u32 image_at = weights_at + (KEEPS_WEIGHTS ? STEPS : C::STAGES) * Patch::WEIGHTS * 16;
  const u32 zeros_at = image_at + C::STAGES * Patch::IMAGE * 16;  // 16 bytes

  const int thread = threadIdx.x;
  const int n0 = in_order(blockIdx.y, gridDim.y) * C::BLOCK_N;
  const int group = in_order(blockIdx.z, gridDim.z);
  const int first_column = (IsGrouped<C>::value ? group * C::N : 0) + n0;
  const int end_column = (IsGrouped<C>::value ? group * C::N : 0) + C::N;

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
  const auto epilogue_of = [&](int patch, int i) {
    const PatchRows<C, A> rows{Patch::origin(patch), products.row(i)};
    constexpr bool INSIDE = C::N % C::BLOCK_N == 0;
    return FragmentEpilogue<C::WIDTH, Products::COLUMNS, INSIDE, Functor, PatchRows<C, A>>(
        functor, rows, first_column + products.column(i), end_column);
  };
  // What differs by column alone is fetched once; of rows, that of a fragment ahead of its turn;
  // where the loop leaves registers for it.
  constexpr bool BY_ROW = Functor::INPUTS_BY_ROW;
  constexpr int SLOTS = BY_ROW ? 1 : Products::PARTS;
  using Fetched = typename decltype(epilogue_of(0, 0))::Fetched;
  constexpr int FREE = min_of(255, 65536 / THREADS) - Products::LOOP;
  constexpr bool AHEAD = FREE * 4 >= SLOTS * static_cast<int>(sizeof(Fetched));
  Fetched fetched[SLOTS];
  if constexpr (AHEAD && !BY_ROW) {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) fetched[i] = epilogue_of(blockIdx.x, i).fetch();
  }
  const auto finish = [&](int patch) {
#pragma unroll
    for (int i = 0; i < Products::FRAGMENTS; ++i) {
      Fetched& slot = fetched[i % SLOTS];
      if constexpr (!AHEAD) slot = epilogue_of(patch, i).fetch();
      const Fetched here = slot;
      if constexpr (AHEAD && BY_ROW) {
        if (i + 1 < Products::FRAGMENTS) slot = epilogue_of(patch, i + 1).fetch();
      }
      float sums[Products::COLUMNS / 2];
      products.sums(i, sums);
      epilogue_of(patch, i).run(nullptr, here, sums);
    }
  };

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
      Products::show();
      __syncthreads();
      if constexpr (AHEAD && BY_ROW) {
        if (step + 1 == STEPS) fetched[0] = epilogue_of(patch, 0).fetch();
      }
      products.multiply(weights, image, [&](int row) {
        if constexpr (C::STAGES > 1) copy_part(s + C::STAGES - 1, row);
      });
      if constexpr (C::STAGES > 1) ptx::cp_async_commit();
      products.wait();
    }
    finish(patch);
  }
  ptx::cp_async_wait<0>();
}

}  // namespace gtco
