// Windows of images whose channels do not mix: depthwise convolution, maximum, mean. A thread has V
// channels of STRIP windows that are neighbours along the width; what several of them read is
// loaded once. It waits for few loads: the weights are asked for ahead of the dependent-launch
// wait, and as many rows of pixels at once as its registers hold. Neighbouring threads have
// neighbouring vectors of a pixel; where the functor makes row statistics, as `ChunkPlace` says.
//
// Config: Element, IMAGES, HEIGHT, WIDTH, COLUMNS (channels), STRIP, THREADS, and the window fields
// of windows.cuh; of volumes FRAMES too. Image has `at(image, y, x, channel)`, or that of volumes
// `at(image, z, y, x, channel)`. Tap says what a window is reduced to, and `kh` counts the rows of
// all its frames:
//   CONSTANT                      whether nothing in the launch chain writes the weights
//   start()                       of a sum or maximum
//   outside()                     what a pixel beyond the image counts as
//   weights<V>(kh, kw, channel)   as they lie in memory
//   add(sum, pixel, weight)
//   finish(sum, y, x)             of the window that begins at (y, x)
// With REPEAT, so many channels side by side are one of memory.
// Where the strides are 0, the windows share the image evenly: window i of P has the rows from
// i * HEIGHT / P to (i + 1) * HEIGHT / P, rounded outward; KERNEL is the largest, and finish gets
// (i, j).
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
#include "pieces.cuh"
#include "windows.cuh"

namespace gtco {

// Of a tap that weighs nothing.
struct NoWeights {};

template <int V>
__device__ __forceinline__ Vec<float, V> unpack(const NoWeights&) {
  return {};
}

// How many channels side by side are one of memory: `static constexpr int REPEAT = 2;` in C.
template <class C, class = void>
struct RepeatOf : Constant<int, 1> {};
template <class C>
struct RepeatOf<C, decltype(static_cast<void>(C::REPEAT))> : Constant<int, C::REPEAT> {};

// V channels from where the first lies, or each `outside` where they are not `there`.
template <class C, int V, class T>
__device__ __forceinline__ Packed<T, V> load_channels(const T* from, bool there, float outside) {
  constexpr int REPEAT = V > 1 ? RepeatOf<C>::value : 1;  // of one channel, none is another's
  static_assert(V % REPEAT == 0, "a vector has all that are one of memory");
  const auto stored = load_packed_or<V / REPEAT>(
      from, there, pack<T>(map<V / REPEAT>([&](int) { return outside; })));
  if constexpr (REPEAT == 1) {
    return stored;
  } else {
    Packed<T, V> result;
#pragma unroll
    for (int i = 0; i < V; ++i) result.data[i] = stored.data[i / REPEAT];
    return result;
  }
}

template <class C, class Image>
__device__ __forceinline__ auto pixel_at(const Image& image, int n, int z, int y, int x, int col) {
  if constexpr (is_volume<C>)
    return image.at(n, z, y, x, col);
  else
    return image.at(n, y, x, col);
}

template <class C, class Image, class Tap, class Functor>
__device__ __forceinline__ void stencil(const Image& image, const Tap& tap, const Functor& functor,
                                        int block) {
  using Element = typename C::Element;
  constexpr int V = Functor::VECTOR;
  constexpr int VECTORS = ceil_div(C::COLUMNS, V), STRIPS = ceil_div(C::Q, C::STRIP);
  static_assert(C::COLUMNS % V == 0, "a vector does not cross a pixel's end");
  constexpr int SPAN = (C::STRIP - 1) * C::STRIDE_W + (C::KERNEL_W - 1) * C::DILATION_W + 1;
  constexpr bool SHARED = C::STRIDE_H == 0;
  static_assert(!SHARED || (C::STRIP == 1 && C::STRIDE_W == 0), "windows of several sizes");
  using Pixels = Packed<Element, V>;
  using Weights = decltype(tap.template weights<V>(0, 0, 0));
  constexpr int REGISTERS = 96;  // for each of the two
  constexpr int ROW_REGISTERS = ceil_div(SPAN * static_cast<int>(sizeof(Pixels)), 4);
  constexpr int TAP_ROWS = tap_rows_of<C>(), TAPS = TAP_ROWS * C::KERNEL_W;
  constexpr int ROWS = max_of(1, min_of(TAP_ROWS, REGISTERS / ROW_REGISTERS));  // in flight
  constexpr int LINES = window_rows_of<C>();                                    // of an image
  constexpr bool AHEAD = Tap::CONSTANT && TAPS * static_cast<int>(sizeof(Weights)) <= 4 * REGISTERS;

  using Place = ChunkPlace<C::COLUMNS, V>;
  constexpr int SHARES = Functor::ROW_STATS ? Place::WHOLE + Place::LAST : VECTORS;  // of a strip
  const int blocks = ceil_div(C::IMAGES * LINES * STRIPS * SHARES, C::THREADS);
  const int item = in_order(block, blocks) * C::THREADS + threadIdx.x;
  int col = item % VECTORS * V, strip = item / VECTORS;
  if constexpr (Functor::ROW_STATS) {
    const Place place(item, C::IMAGES * LINES * STRIPS);
    col = place.col, strip = place.row;
  }
  const int q0 = strip % STRIPS * C::STRIP, line = strip / STRIPS;
  const bool on = line < C::IMAGES * LINES;
  const int n = line / LINES, p = line % C::P;
  const int y0 = SHARED ? p * C::HEIGHT / C::P : p * C::STRIDE_H - C::BEFORE_H;
  const int x0 = SHARED ? q0 * C::WIDTH / C::Q : q0 * C::STRIDE_W - C::BEFORE_W;
  const int bottom = SHARED ? ceil_div((p + 1) * C::HEIGHT, C::P) : C::HEIGHT;
  const int right = SHARED ? ceil_div((q0 + 1) * C::WIDTH, C::Q) : C::WIDTH;

  ptx::griddepcontrol_launch_dependents();
  Weights weights[AHEAD ? TAPS : 1];
  if constexpr (AHEAD) {
#pragma unroll
    for (int i = 0; i < TAPS; ++i)
      weights[i] = tap.template weights<V>(i / C::KERNEL_W, i % C::KERNEL_W, col);
  }
  ptx::griddepcontrol_wait();

  Pixels pixels[ROWS][SPAN];  // those between the taps of a dilated kernel are not loaded
  const auto load_row = [&](int kh) {
    int y = y0 + kh * C::DILATION_H, z = 0;
    bool inside = on;
    if constexpr (is_volume<C>) {
      y = y0 + kh % C::KERNEL_H * C::DILATION_H;
      z = line / C::P % C::O * C::STRIDE_T - C::BEFORE_T + kh / C::KERNEL_H * C::DILATION_T;
      inside = on && z >= 0 && z < C::FRAMES;
    }
    inside = inside && y >= 0 && y < bottom;
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      const int x = x0 + i;
      const bool there = inside && x >= 0 && x < right;
      pixels[kh % ROWS][i] =
          load_channels<C, V>(pixel_at<C>(image, n, z, y, x, col), there, tap.outside());
    }
  };
  Vec<float, V> sums[C::STRIP];
#pragma unroll
  for (int s = 0; s < C::STRIP; ++s) sums[s] = map<V>([&](int) { return tap.start(); });
#pragma unroll
  for (int kh = 0; kh < ROWS; ++kh) load_row(kh);
  // Else the assembler puts the products of the first between the loads of the next.
  if constexpr (!AHEAD) __syncwarp();
  // What the epilogue reads comes beside the pixels, for a result that is not that of another.
  using Inputs = typename Functor::template Inputs<V>;
  constexpr int SLOTS = Functor::INPUTS_BY_ROW ? C::STRIP : 1;
  constexpr bool FETCH = SLOTS * static_cast<int>(sizeof(Inputs)) <= 64;
  Inputs fetched[FETCH ? SLOTS : 1];
  if constexpr (FETCH) {
#pragma unroll
    for (int s = 0; s < SLOTS; ++s)
      fetched[s] =
          functor.template inputs<V>(on && q0 + s < C::Q ? line * C::Q + q0 + s : 0, col, true);
  }
#pragma unroll
  for (int kh = 0; kh < TAP_ROWS; ++kh) {
#pragma unroll
    for (int kw = 0; kw < C::KERNEL_W; ++kw) {
      const auto weight = unpack<V>(AHEAD ? weights[AHEAD ? kh * C::KERNEL_W + kw : 0]
                                          : tap.template weights<V>(kh, kw, col));
#pragma unroll
      for (int s = 0; s < C::STRIP; ++s) {
        const auto pixel = unpack<V>(pixels[kh % ROWS][s * C::STRIDE_W + kw * C::DILATION_W]);
#pragma unroll
        for (int i = 0; i < V; ++i) sums[s][i] = tap.add(sums[s][i], pixel[i], weight[i]);
      }
    }
    if (kh + ROWS < TAP_ROWS) load_row(kh + ROWS);
  }
#pragma unroll
  for (int s = 0; s < C::STRIP; ++s) {
    const int row = line * C::Q + q0 + s;
    const bool active = on && q0 + s < C::Q;
    typename Functor::Row values{};
    if constexpr (Functor::ROW_VALUES > 0) {
      if (active) values = functor.row_values(row, true);
    }
    const auto acc = map<V>([&](int i) {
      return SHARED ? tap.finish(sums[s][i], p, q0)
                    : tap.finish(sums[s][i], y0, x0 + s * C::STRIDE_W);
    });
    if constexpr (FETCH) {
      functor.template operator()<V>(row, col, values, active, fetched[SLOTS == 1 ? 0 : s], acc,
                                     StatsOfChunks{});
    } else {
      const auto inputs = functor.template inputs<V>(row, col, active);
      functor.template operator()<V>(row, col, values, active, inputs, acc, StatsOfChunks{});
    }
  }
}

}  // namespace gtco
