// Depthwise convolution of many results: a block copies the pixels of a tile and its border to
// shared memory, SLICE of them, and the weights as fp32. A thread has V channels of ROWS x STRIP
// results; a row of pixels that it has read serves all taps and results that want it. What stencil
// (stencil.cuh) keeps in registers, so that few threads share a multiprocessor, lies in shared
// memory here, and no load in the loop asks whether its pixel is inside.
//
// Config: Element, IMAGES, HEIGHT, WIDTH, COLUMNS (channels), SLICE (of these, of a block), V,
// ROWS, STRIP, DOWN and ACROSS (of these in a tile), THREADS, and the window fields of windows.cuh.
// Image and Tap are as of stencil.cuh; what lies outside counts as 0. Weights begin WEIGHTS_AT
// bytes on. With means of boxes, BOX_H x BOX_W pixels, each of whole strips of ROWS x STRIP, whose
// sums lie SUMS_AT bytes on: a tile and an image are whole boxes.
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
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
  constexpr bool BOXES = HasBoxMeans<Functor>::value;
  [[maybe_unused]] float* means = nullptr;

  extern __shared__ __align__(1024) unsigned char smem[];
  auto* pixels = reinterpret_cast<Element*>(smem);                 // (HIGH, WIDE, SLICE)
  auto* weights = reinterpret_cast<float*>(smem + C::WEIGHTS_AT);  // (TAPS, SLICE)
  const auto block = in_order(blockIdx.x, gridDim.x);
  const int col0 = in_order(blockIdx.y, gridDim.y) * C::SLICE, tile = block % (TILES_H * TILES_W);
  const int n = block / (TILES_H * TILES_W);
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
    int strip = item / VECTORS, c = item % VECTORS * V, chunk_strip = strip;
    bool is_whole = true;  // the chunk of row statistics
    if constexpr (Functor::ROW_STATS) {
      const Place place(item, STRIPS);
      const int rest = item - STRIPS * Place::WHOLE;
      strip = place.row, c = place.col, is_whole = rest < 0;
      chunk_strip = is_whole ? item / max_of(1, Place::WHOLE) : rest / max_of(1, Place::LAST);
    }
    const bool on = strip < STRIPS;  // an idle lane of a chunk has its place, and nothing else
    const int place = min_of(chunk_strip, STRIPS - 1);
    const int down = place / C::ACROSS * C::ROWS, across = place % C::ACROSS * C::STRIP;
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
    constexpr int RESULTS = C::ROWS * C::STRIP;
    // Rows of the results, at distances that are known.
    const int row0 = (n * C::P + p0 + down) * C::Q + q0 + across;
    const auto row_of = [&](int result) {
      return row0 + result / C::STRIP * C::Q + result % C::STRIP;
    };
    const auto is_there = [&](int result) {
      return p0 + down + result / C::STRIP < C::P && q0 + across + result % C::STRIP < C::Q;
    };
    // What the epilogue reads is asked for at once; for a result that is not, that of another.
    using Inputs = typename Functor::template Inputs<V>;
    Inputs inputs[Functor::INPUTS_BY_ROW ? RESULTS : 1];
#pragma unroll
    for (int i = 0; i < (Functor::INPUTS_BY_ROW ? RESULTS : 1); ++i)
      inputs[i] = functor.template inputs<V>(is_there(i) ? row_of(i) : 0, col0 + c, on);
    Moments moments[Functor::ROW_STATS ? RESULTS : 1];
    float* stats = nullptr;
    [[maybe_unused]] Vec<float, V> box_sum{};
#pragma unroll
    for (int result = 0; result < RESULTS; ++result) {
      const int at = row_of(result);
      const bool active = on && is_there(result);
      typename Functor::Row values{};
      if constexpr (Functor::ROW_VALUES > 0) {
        if (active) values = functor.row_values(at, true);
      }
      const Inputs& in = inputs[Functor::INPUTS_BY_ROW ? result : 0];
      const auto& sum = sums[result / C::STRIP][result % C::STRIP];
      if constexpr (Functor::ROW_STATS) {
        functor.template operator()<V>(at, col0 + c, values, active, in, sum,
                                       StatsOfResults<RESULTS>{moments, result, stats});
      } else if constexpr (BOXES) {
        functor.template operator()<V>(at, col0 + c, values, active, in, sum,
                                       SumsOfBox{&box_sum[0], means});
      } else {
        functor.template operator()<V>(at, col0 + c, values, active, in, sum);
      }
    }
    if constexpr (BOXES) {
      if (on) store<V>(reinterpret_cast<float*>(smem + C::SUMS_AT) + strip * C::SLICE + c, box_sum);
    }
    if constexpr (Functor::ROW_STATS) {
      constexpr int CHUNKS = ceil_div(C::COLUMNS, STATS_CHUNK);
      const auto keep = [&](int result, const Moments& of) {
        if (chunk_strip < STRIPS && is_there(result))
          gtco::store<2>(stats + (row_of(result) * CHUNKS + (col0 + c) / STATS_CHUNK) * 2,
                         Vec<float, 2>{{of.mean, of.m2}});
      };
      if (is_whole) {  // all lanes of a warp or none
        if constexpr (Place::WHOLE > 0) merge_results<Place::LANES, true>(moments, 2.0f, keep);
      } else if constexpr (Place::LAST > 0) {
        constexpr bool WHOLE = Place::LAST * V == C::SLICE - Place::FIRST;
        merge_results<Place::LAST, WHOLE>(moments, on ? 2.0f : 0.0f, keep);
      }
    }
  }
  if constexpr (BOXES) {
    __syncthreads();
    const auto* sums = reinterpret_cast<const float*>(smem + C::SUMS_AT);  // (DOWN, ACROSS, SLICE)
    constexpr int BOXES_W = TILE_W / C::BOX_W, IN_TILE = TILE_H / C::BOX_H * BOXES_W;
    constexpr int HEIGHT = C::BOX_H / C::ROWS, WIDTH = C::BOX_W / C::STRIP;  // of a box, strips
#pragma unroll 1
    for (int i = threadIdx.x; i < IN_TILE * VECTORS; i += C::THREADS) {
      const int box = i / VECTORS, c = i % VECTORS * V;
      const int p = p0 + box / BOXES_W * C::BOX_H, q = q0 + box % BOXES_W * C::BOX_W;
      if (p >= C::P || q >= C::Q) continue;
      const int first = box / BOXES_W * HEIGHT * C::ACROSS + box % BOXES_W * WIDTH;
      Vec<float, V> total{};
#pragma unroll
      for (int strip = 0; strip < HEIGHT * WIDTH; ++strip) {
        const int at = first + strip / WIDTH * C::ACROSS + strip % WIDTH;
        const auto sum = load<V>(sums + at * C::SLICE + c);
#pragma unroll
        for (int j = 0; j < V; ++j) total[j] += sum[j];
      }
      const int to = (n * (C::P / C::BOX_H) + p / C::BOX_H) * (C::Q / C::BOX_W) + q / C::BOX_W;
      store<V>(means + to * C::COLUMNS + col0 + c,
               map<V>([&](int j) { return total[j] / (C::BOX_H * C::BOX_W); }));
    }
  }
}

}  // namespace gtco
