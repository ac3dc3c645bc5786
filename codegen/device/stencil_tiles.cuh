// Depthwise convolution of many results: a block copies the pixels of a tile and its border to
// shared memory, SLICE of them, and the weights as fp32. A thread has V channels of ROWS x STRIP
// results; a row of pixels that it has read serves all taps and results that want it. What stencil
// (stencil.cuh) keeps in registers, so that few threads share a multiprocessor, lies in shared
// memory here, and no load in the loop asks whether its pixel is inside.
//
// Config: Element, IMAGES, HEIGHT, WIDTH, COLUMNS (channels), SLICE (of these, of a block), V,
// ROWS, STRIP, DOWN and ACROSS (of these in a tile), THREADS, and the window fields of windows.cuh.
// Image and Tap are as of stencil.cuh; what lies outside counts as 0. Weights begin WEIGHTS_AT
// bytes on.
#pragma once

#include "epilogue.cuh"
#include "windows.cuh"

namespace gtco {

template <class C, class Image, class Tap, class Functor>
__device__ __forceinline__ void stencil_tiles(const Image& image, const Tap& tap,
                                              const Functor& functor) {
  using Element = typename C::Element;
  constexpr int V = C::V, CHUNK = 16 / sizeof(Element), CHUNKS = C::SLICE / CHUNK;
  constexpr int TILE_H = C::ROWS * C::DOWN, TILE_W = C::STRIP * C::ACROSS;
  constexpr int REACH_H = (C::KERNEL_H - 1) * C::DILATION_H;
  constexpr int REACH_W = (C::KERNEL_W - 1) * C::DILATION_W;
  constexpr int HIGH = (TILE_H - 1) * C::STRIDE_H + REACH_H + 1;
  constexpr int WIDE = (TILE_W - 1) * C::STRIDE_W + REACH_W + 1;
  constexpr int LINES = (C::ROWS - 1) * C::STRIDE_H + REACH_H + 1;  // that a thread reads
  constexpr int SPAN = (C::STRIP - 1) * C::STRIDE_W + REACH_W + 1;
  constexpr int TAPS = C::KERNEL_H * C::KERNEL_W;
  constexpr int TILES_H = ceil_div(C::P, TILE_H), TILES_W = ceil_div(C::Q, TILE_W);
  constexpr int STRIPS = C::DOWN * C::ACROSS, VECTORS = C::SLICE / V;
  using Place = ChunkPlace<C::SLICE, V>;
  constexpr int ITEMS = STRIPS * (Functor::ROW_STATS ? Place::WHOLE + Place::LAST : VECTORS);
  static_assert(C::COLUMNS % C::SLICE == 0 && C::SLICE % CHUNK == 0, "whole chunks");
  static_assert(C::SLICE % V == 0 && CHUNK % V == 0, "whole vectors");

  extern __shared__ __align__(1024) unsigned char smem[];
  auto* pixels = reinterpret_cast<Element*>(smem);                 // (HIGH, WIDE, SLICE)
  auto* weights = reinterpret_cast<float*>(smem + C::WEIGHTS_AT);  // (TAPS, SLICE)
  const int col0 = blockIdx.y * C::SLICE, tile = blockIdx.x % (TILES_H * TILES_W);
  const int n = blockIdx.x / (TILES_H * TILES_W);
  const int p0 = tile / TILES_W * TILE_H, q0 = tile % TILES_W * TILE_W;

  const auto copy_weights = [&] {
#pragma unroll 2
    for (int i = threadIdx.x; i < TAPS * VECTORS; i += C::THREADS) {
      const int at = i / VECTORS, c = i % VECTORS * V;
      store<V>(weights + at * C::SLICE + c,
               unpack<V>(tap.template weights<V>(at / C::KERNEL_W, at % C::KERNEL_W, col0 + c)));
    }
  };
  ptx::griddepcontrol_launch_dependents();
  if constexpr (Tap::CONSTANT) copy_weights();
  ptx::griddepcontrol_wait();
  if constexpr (!Tap::CONSTANT) copy_weights();
  const u32 to = ptx::shared_address(pixels);
#pragma unroll 4
  for (int i = threadIdx.x; i < HIGH * WIDE * CHUNKS; i += C::THREADS) {
    const int chunk = i % CHUNKS, pixel = i / CHUNKS;
    const int y = p0 * C::STRIDE_H - C::BEFORE_H + pixel / WIDE;
    const int x = q0 * C::STRIDE_W - C::BEFORE_W + pixel % WIDE;
    const bool inside = y >= 0 && y < C::HEIGHT && x >= 0 && x < C::WIDTH;
    ptx::cp_async<16>(to + i * 16, inside ? image.at(n, y, x, col0 + chunk * CHUNK) : image.base,
                      inside);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

#pragma unroll 1
  for (int first = 0; first < ITEMS; first += C::THREADS) {  // all lanes together
    const int item = first + threadIdx.x;
    int strip = item / VECTORS, c = item % VECTORS * V;
    if constexpr (Functor::ROW_STATS) {
      const Place place(item, STRIPS);
      strip = place.row, c = place.col;
    }
    const bool on = strip < STRIPS;
    const int down = on ? strip / C::ACROSS * C::ROWS : 0;
    const int across = on ? strip % C::ACROSS * C::STRIP : 0;
    const Element* from =
        pixels + (down * C::STRIDE_H * WIDE + across * C::STRIDE_W) * C::SLICE + c;
    Vec<float, V> sums[C::ROWS][C::STRIP];
#pragma unroll
    for (int r = 0; r < C::ROWS; ++r)
#pragma unroll
      for (int s = 0; s < C::STRIP; ++s) sums[r][s] = map<V>([&](int) { return tap.start(); });
    // Written out, a 7 x 7 of two rows would be more code than a multiprocessor keeps.
    constexpr int UNROLLED = TAPS * C::ROWS * C::STRIP * V <= 512 ? LINES : 1;
#pragma unroll UNROLLED
    for (int line = 0; line < LINES; ++line) {
      Vec<float, V> row[SPAN];
#pragma unroll
      for (int i = 0; i < SPAN; ++i) row[i] = load<V>(from + (line * WIDE + i) * C::SLICE);
#pragma unroll
      for (int r = 0; r < C::ROWS; ++r) {
        const int reach = line - r * C::STRIDE_H;
        if (reach < 0 || reach > REACH_H || reach % C::DILATION_H != 0) continue;
        const float* of_row = weights + reach / C::DILATION_H * C::KERNEL_W * C::SLICE + c;
#pragma unroll
        for (int kw = 0; kw < C::KERNEL_W; ++kw) {
          const Vec<float, V> weight = load<V>(of_row + kw * C::SLICE);
#pragma unroll
          for (int s = 0; s < C::STRIP; ++s)
#pragma unroll
            for (int i = 0; i < V; ++i)
              sums[r][s][i] =
                  tap.add(sums[r][s][i], row[s * C::STRIDE_W + kw * C::DILATION_W][i], weight[i]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < C::ROWS; ++r)
#pragma unroll
      for (int s = 0; s < C::STRIP; ++s) {
        const int p = p0 + down + r, q = q0 + across + s;
        const bool active = on && p < C::P && q < C::Q;
        const int at = (n * C::P + p) * C::Q + q;
        typename Functor::Row values{};
        if constexpr (Functor::ROW_VALUES > 0) {
          if (active) values = functor.row_values(at, true);
        }
        const auto inputs = functor.template inputs<V>(at, col0 + c, active);
        functor.template operator()<V>(at, col0 + c, values, active, inputs, sums[r][s],
                                       StatsOfChunks{});
      }
  }
}

}  // namespace gtco
