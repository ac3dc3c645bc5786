// Images sampled at points that a grid gives: a thread has REPEAT times V channels of one point,
// and weighs the TAPS x TAPS pixels around it, which follows torch's rules on GPUs in fp32. A pixel
// outside the image counts zero and is not read; one inside counts even where its weight is zero.
//
// Config: Element, IMAGES, HEIGHT, WIDTH, COLUMNS (channels), POINTS (of an image), TAPS (2, or 1
// for the nearest pixel), BORDER (the border's pixels go on outside, instead of zeros), ALIGN (-1
// and 1 are centres of pixels, instead of edges), REPEAT, THREADS. Image has `at(image, y, x,
// channel)`; Grid has `point(row, active)`, x and y.
#pragma once

#include "epilogue.cuh"
#include "pieces.cuh"

namespace gtco {

// The pixels next to a coordinate along one axis of `size` pixels.
template <class C>
struct Taps {
  int at[C::TAPS];
  float weight[C::TAPS];
  bool inside[C::TAPS];

  __device__ __forceinline__ Taps(float coordinate, int size) {
    const float n = static_cast<float>(size), from_one = coordinate + 1.0f;
    float from = C::ALIGN ? from_one * 0.5f * (n - 1.0f) : (from_one * n - 1.0f) * 0.5f;
    if constexpr (C::BORDER) {
      from = fminf(fmaxf(from, 0.0f), n - 1.0f);  // NaN goes to the first pixel
    } else if (!(from >= -1.0f && from < n)) {
      from = -2.0f;  // NaN and what no int has, too
    }
    const float low = C::TAPS == 1 ? rintf(from) : floorf(from);
    weight[0] = C::TAPS == 1 ? 1.0f : low + 1.0f - from;
    if constexpr (C::TAPS == 2) weight[1] = from - low;
#pragma unroll
    for (int i = 0; i < C::TAPS; ++i) {
      at[i] = static_cast<int>(low) + i;
      inside[i] = at[i] >= 0 && at[i] < size;
    }
  }
};

template <class C, class Image, class Grid, class Functor>
__device__ __forceinline__ void grid_sample(const Image& image, const Grid& grid,
                                            const Functor& functor, int block) {
  constexpr int V = Functor::VECTOR, T = C::TAPS;
  constexpr int VECTORS = C::COLUMNS / V / C::REPEAT;  // of a point side by side in a warp
  static_assert(C::COLUMNS % (V * C::REPEAT) == 0, "no vector crosses a point's end");
  const int item = block * C::THREADS + threadIdx.x;
  const int first = item % VECTORS * V, row = item / VECTORS;
  const bool active = row < C::IMAGES * C::POINTS;
  const int n = row / C::POINTS;

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const auto point = unpack(grid.point(row, active));
  const Taps<C> xs(point[0], C::WIDTH), ys(point[1], C::HEIGHT);
  Packed<typename C::Element, V> pixels[C::REPEAT][T][T];
#pragma unroll
  for (int r = 0; r < C::REPEAT; ++r)
#pragma unroll
    for (int y = 0; y < T; ++y)
#pragma unroll
      for (int x = 0; x < T; ++x)
        pixels[r][y][x] = load_packed<V>(image.at(n, ys.at[y], xs.at[x], first + r * VECTORS * V),
                                         active && ys.inside[y] && xs.inside[x]);
  typename Functor::Row values{};
  if constexpr (Functor::ROW_VALUES > 0) {
    if (active) values = functor.row_values(row, true);
  }
#pragma unroll
  for (int r = 0; r < C::REPEAT; ++r) {
    const int col = first + r * VECTORS * V;
    auto acc = map<V>([&](int) { return 0.0f; });
#pragma unroll
    for (int y = 0; y < T; ++y)
#pragma unroll
      for (int x = 0; x < T; ++x) {
        const auto pixel = unpack<V>(pixels[r][y][x]);
        const float weight = ys.weight[y] * xs.weight[x];
#pragma unroll
        for (int i = 0; i < V; ++i) acc[i] = T == 1 ? pixel[i] : fmaf(weight, pixel[i], acc[i]);
      }
    const auto inputs = functor.template inputs<V>(row, col, active);
    functor.template operator()<V>(row, col, values, active, inputs, acc);
  }
}

}  // namespace gtco
