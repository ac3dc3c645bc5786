// Images sampled at points that grids give: a thread has REPEAT times V channels of one row of the
// result, which is the weighed sum of the row's points of every image; SHARE neighbours have them
// together. A point is the TAPS x TAPS pixels around it, by torch's rules on GPUs, in fp32. A pixel
// outside the image counts zero and is not read; one inside counts even where its weight is zero.
//
// Config: ROWS (of the result), IMAGE_ROWS (of these, one image's), COLUMNS (channels), TAPS (2, or
// 1 for the nearest pixel), BORDER (the border's pixels go on outside, instead of zeros), ALIGN (-1
// and 1 are centres of pixels, instead of edges), REPEAT, SHARE, THREADS. A level is what is
// sampled in one size: HEIGHT, WIDTH, POINTS (of a row), FIRST (of them among the row's weights),
// `pixel(image, y, x, channel)`, where it lies, and `point(row, i, active)`, its x and y. Weights
// have `at(row, i, active)`.
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
#include "pieces.cuh"

namespace gtco {

struct NoWeights {
  __device__ __forceinline__ float at(int, int, bool) const { return 1.0f; }
};

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

// A point of a row and its weight.
template <class C, class Level, class Weights>
struct Sample {
  decltype(unpack(Level{}.point(0, 0, true))) point;
  float share;

  __device__ __forceinline__ void ask(const Level& level, const Weights& weights, int row, int p,
                                      bool active) {
    point = unpack(level.point(row, p, active));
    share = weights.at(row, Level::FIRST + p, active);
  }
};

template <class C, class Weights, int V>
__device__ __forceinline__ void add_samples(const Weights&, int, int, int, bool, Vec<float, V>*) {}

// Adds every SHAREth point of `row` in each level, from `lane` on, to the sums of its channels from
// `first` on. The points of all levels are asked for ahead of the first pixels.
template <class C, class Weights, int V, class Level, class... Others>
__device__ __forceinline__ void add_samples(const Weights& weights, int row, int first, int lane,
                                            bool active, Vec<float, V>* sums, const Level& level,
                                            const Others&... others) {
  constexpr int T = C::TAPS, STEP = C::COLUMNS / C::REPEAT;
  constexpr int COUNT = ceil_div(Level::POINTS, C::SHARE);
  constexpr bool AHEAD = COUNT <= 8;
  const int n = row / C::IMAGE_ROWS;
  const auto is_point = [&](int p) {
    return active && (Level::POINTS % C::SHARE == 0 || p < Level::POINTS);
  };
  Sample<C, Level, Weights> samples[AHEAD ? COUNT : 1];
  if constexpr (AHEAD) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int p = i * C::SHARE + lane;
      samples[i].ask(level, weights, row, p, is_point(p));
    }
  }
  add_samples<C>(weights, row, first, lane, active, sums, others...);
#pragma unroll(AHEAD ? COUNT : 4)
  for (int i = 0; i < COUNT; ++i) {
    const int p = i * C::SHARE + lane;
    if constexpr (!AHEAD) samples[0].ask(level, weights, row, p, is_point(p));
    const auto& sample = samples[AHEAD ? i : 0];
    const Taps<C> xs(sample.point[0], Level::WIDTH), ys(sample.point[1], Level::HEIGHT);
    using Pixels = decltype(load_packed<V>(level.pixel(0, 0, 0, 0)));
    Pixels pixels[C::REPEAT][T][T];
#pragma unroll
    for (int r = 0; r < C::REPEAT; ++r)
#pragma unroll
      for (int y = 0; y < T; ++y)
#pragma unroll
        for (int x = 0; x < T; ++x)
          pixels[r][y][x] =
              load_packed_or<V>(level.pixel(n, ys.at[y], xs.at[x], first + r * STEP),
                                is_point(p) && ys.inside[y] && xs.inside[x], Pixels{});
#pragma unroll
    for (int r = 0; r < C::REPEAT; ++r)
#pragma unroll
      for (int y = 0; y < T; ++y)
#pragma unroll
        for (int x = 0; x < T; ++x) {
          const auto pixel = unpack<V>(pixels[r][y][x]);
          const float weight = sample.share * (ys.weight[y] * xs.weight[x]);
#pragma unroll
          for (int i = 0; i < V; ++i) sums[r][i] = fmaf(weight, pixel[i], sums[r][i]);
        }
  }
}

template <class C, class Functor, class Weights, class... Levels>
__device__ __forceinline__ void grid_sample(const Functor& functor, int block,
                                            const Weights& weights, const Levels&... levels) {
  constexpr int V = Functor::VECTOR;
  constexpr int VECTORS = C::COLUMNS / V / C::REPEAT;  // of a row side by side in a warp
  static_assert(C::COLUMNS % (V * C::REPEAT) == 0, "no vector crosses a row's end");
  const int blocks = ceil_div(C::ROWS * VECTORS * C::SHARE, C::THREADS);
  const int thread = in_order(block, blocks) * C::THREADS + threadIdx.x;
  const int item = thread / C::SHARE, lane = thread % C::SHARE;
  const int first = item % VECTORS * V, row = item / VECTORS;
  const bool active = row < C::ROWS;

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Vec<float, V> sums[C::REPEAT] = {};
  add_samples<C>(weights, row, first, lane, active, sums, levels...);
#pragma unroll
  for (int r = 0; r < C::REPEAT; ++r)
#pragma unroll
    for (int i = 0; i < V; ++i) sums[r][i] = lanes_sum<C::SHARE>(sums[r][i]);
  const bool stores = active && lane == 0;
  typename Functor::Row values{};
  if constexpr (Functor::ROW_VALUES > 0) {
    if (stores) values = functor.row_values(row, true);
  }
#pragma unroll
  for (int r = 0; r < C::REPEAT; ++r) {
    const int col = first + r * VECTORS * V;
    const auto inputs = functor.template inputs<V>(row, col, stores);
    functor.template operator()<V>(row, col, values, stores, inputs, sums[r]);
  }
}

}  // namespace gtco
