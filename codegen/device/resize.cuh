// Images made larger or smaller: a thread has REPEAT times V channels of one pixel of the result,
// and weighs the TAPS x TAPS pixels around its place in the image, which follows torch's rules in
// fp32. Finding that place takes more instructions than weighing two channels does.
//
// Of an image that is made wider a thread may have ACROSS pixels side by side: they lie between
// fewer columns than they are, whose rows are weighed once for all of them.
//
// Config: Element, IMAGES, HEIGHT, WIDTH, COLUMNS (channels), P, Q (rows and columns of the
// result), SCALE_H, SCALE_W (pixels of the image for one of the result), REPEAT, ACROSS, FACTOR,
// THREADS. Image has `at(image, y, x, channel)`. Axis has TAPS and
// `place(dst, scale, size, at, weight)`.
#pragma once

#include "epilogue.cuh"
#include "order.cuh"
#include "pieces.cuh"

namespace gtco {

template <bool CENTRES>
struct Nearest {
  static constexpr int TAPS = 1;
  static __device__ __forceinline__ void place(int dst, float scale, int size, int* at,
                                               float* weight) {
    const float from = (static_cast<float>(dst) + (CENTRES ? 0.5f : 0.0f)) * scale;
    at[0] = min_of(static_cast<int>(from), size - 1);
    weight[0] = 1.0f;
  }
};

template <bool ALIGN>
struct Linear {
  static constexpr int TAPS = 2;
  static __device__ __forceinline__ void place(int dst, float scale, int size, int* at,
                                               float* weight) {
    const float d = static_cast<float>(dst);
    const float from = ALIGN ? scale * d : fmaxf(scale * (d + 0.5f) - 0.5f, 0.0f);
    at[0] = min_of(static_cast<int>(from), size - 1);
    // Along a size that stays no neighbour is read, which may be NaN: torch's rule on CPUs.
    at[1] = scale == 1.0f ? at[0] : min_of(at[0] + 1, size - 1);
    weight[1] = from - static_cast<float>(at[0]);
    weight[0] = 1.0f - weight[1];
  }
};

template <bool ALIGN>
struct Cubic {
  static constexpr int TAPS = 4;
  static __device__ __forceinline__ void place(int dst, float scale, int size, int* at,
                                               float* weight) {
    constexpr float A = -0.75f;
    const float d = static_cast<float>(dst);
    const float from = ALIGN ? scale * d : scale * (d + 0.5f) - 0.5f;
    int first = static_cast<int>(from);
    if (static_cast<float>(first) > from) --first;  // towards minus infinity
    const float t = from - static_cast<float>(first);
#pragma unroll
    for (int i = 0; i < TAPS; ++i) {
      at[i] = max_of(0, min_of(first - 1 + i, size - 1));
      const float x = i == 0 ? t + 1.0f : i == 1 ? t : i == 2 ? 1.0f - t : 2.0f - t;
      weight[i] = i == 1 || i == 2 ? ((A + 2.0f) * x - (A + 3.0f)) * x * x + 1.0f
                                   : ((A * x - 5.0f * A) * x + 8.0f * A) * x - 4.0f * A;
    }
  }
};

__device__ __forceinline__ constexpr int ceil_of(float x) {
  return static_cast<float>(static_cast<int>(x)) < x ? static_cast<int>(x) + 1
                                                     : static_cast<int>(x);
}

template <class C, class Axis, class Image, class Functor>
__device__ __forceinline__ void resize(const Image& image, const Functor& functor, int block) {
  constexpr int V = Functor::VECTOR, T = Axis::TAPS;
  constexpr int VECTORS = C::COLUMNS / V / C::REPEAT;  // of a pixel side by side in a warp
  static_assert(C::COLUMNS % (V * C::REPEAT) == 0, "no vector crosses a pixel's end");
  const int blocks = ceil_div(C::IMAGES * C::P * C::Q * VECTORS, C::THREADS);
  const int item = in_order(block, blocks) * C::THREADS + threadIdx.x;
  const int first = item % VECTORS * V, row = item / VECTORS;
  const bool active = row < C::IMAGES * C::P * C::Q;
  const int n = active ? row / (C::P * C::Q) : 0;
  int ys[T], xs[T];
  float down[T], across[T];
  Axis::place(row / C::Q % C::P, C::SCALE_H, C::HEIGHT, ys, down);
  Axis::place(row % C::Q, C::SCALE_W, C::WIDTH, xs, across);

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Packed<typename C::Element, V> pixels[C::REPEAT][T][T];
#pragma unroll
  for (int r = 0; r < C::REPEAT; ++r)
#pragma unroll
    for (int y = 0; y < T; ++y)
#pragma unroll
      for (int x = 0; x < T; ++x)
        pixels[r][y][x] = load_packed<V>(image.at(n, ys[y], xs[x], first + r * VECTORS * V));
  typename Functor::Row values{};
  if constexpr (Functor::ROW_VALUES > 0) {
    if (active) values = functor.row_values(row, true);
  }
#pragma unroll
  for (int r = 0; r < C::REPEAT; ++r) {
    const int col = first + r * VECTORS * V;
    auto acc = map<V>([&](int) { return 0.0f; });
#pragma unroll
    for (int y = 0; y < T; ++y) {
      auto line = map<V>([&](int) { return 0.0f; });
#pragma unroll
      for (int x = 0; x < T; ++x) {
        const auto pixel = unpack<V>(pixels[r][y][x]);
#pragma unroll
        for (int i = 0; i < V; ++i)
          line[i] = T == 1 ? pixel[i] : fmaf(across[x], pixel[i], line[i]);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) acc[i] = T == 1 ? line[i] : fmaf(down[y], line[i], acc[i]);
    }
    const auto inputs = functor.template inputs<V>(row, col, active);
    functor.template operator()<V>(row, col, values, active, inputs, acc);
  }
}

// Between which columns ACROSS pixels side by side lie, from pixel `dst` on.
template <class C, class Axis>
struct AnyColumns {
  // Columns that the first pixel's lie ahead of the last one's, at most.
  static constexpr int SPAN = ceil_of((C::ACROSS - 1) * C::SCALE_W), COUNT = SPAN + 2;
  int at[C::ACROSS][2];
  float weight[C::ACROSS][2];

  __device__ __forceinline__ explicit AnyColumns(int dst) {
#pragma unroll
    for (int j = 0; j < C::ACROSS; ++j)
      Axis::place(dst + j, C::SCALE_W, C::WIDTH, at[j], weight[j]);
  }
  __device__ __forceinline__ int first() const { return at[0][0]; }
  // Chosen and not weighed with zero: what a pixel does not lie at may be NaN. At the right border
  // both columns are the last.
  template <int V>
  __device__ __forceinline__ Vec<float, V> between(const Vec<float, V> (&columns)[COUNT],
                                                   int j) const {
    Vec<float, V> left = columns[0], right = columns[1];
#pragma unroll
    for (int x = 1; x <= SPAN; ++x) {
      const bool here = at[j][0] == at[0][0] + x;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        left[i] = here ? columns[x][i] : left[i];
        right[i] = here ? columns[x + 1][i] : right[i];
      }
    }
    return map<V>([&](int i) { return fmaf(weight[j][1], right[i], weight[j][0] * left[i]); });
  }
};

// Of an image that is made FACTOR times as wide, an even number: where FACTOR divides ACROSS, or
// twice ACROSS divides FACTOR, all threads have the same pixels between the same of their columns.
// Beyond a border lies the border's own column.
template <class C>
struct EvenColumns {
  static constexpr int FACTOR = C::FACTOR;
  // Columns from the first pixel's left one to that of pixel `j`.
  static constexpr int behind(int j) { return (2 * j + 1 + FACTOR) / (2 * FACTOR); }
  static constexpr int COUNT = behind(C::ACROSS - 1) + 2;
  static_assert(FACTOR % 2 == 0, "no pixel lies at a column");
  static_assert(C::ACROSS % FACTOR == 0 || FACTOR % (2 * C::ACROSS) == 0, "the same for all");
  int column, within;  // of FACTOR pixels, the first of these

  __device__ __forceinline__ explicit EvenColumns(int dst)
      : column((2 * dst + 1 + FACTOR) / (2 * FACTOR) - 1),
        within(C::ACROSS % FACTOR == 0 ? 0 : dst % FACTOR) {}
  __device__ __forceinline__ int first() const { return column; }
  template <int V>
  __device__ __forceinline__ Vec<float, V> between(const Vec<float, V> (&columns)[COUNT],
                                                   int j) const {
    const int twice = (2 * (within + j) + 1 + FACTOR) % (2 * FACTOR);
    const float weight = static_cast<float>(twice) * (0.5f / FACTOR);
    const auto &left = columns[behind(j)], &right = columns[behind(j) + 1];
    return map<V>([&](int i) { return fmaf(weight, right[i], (1.0f - weight) * left[i]); });
  }
};

template <class C, class Columns, class Axis, class Image, class Functor>
__device__ __forceinline__ void resize_across(const Image& image, const Functor& functor,
                                              int block) {
  constexpr int V = Functor::VECTOR, ACROSS = C::ACROSS, COUNT = Columns::COUNT;
  constexpr int VECTORS = C::COLUMNS / V, GROUPS = C::Q / ACROSS;
  static_assert(Axis::TAPS == 2 && C::SCALE_W < 1.0f && C::Q % ACROSS == 0,
                "whole groups, made wider");
  const int blocks = ceil_div(C::IMAGES * C::P * GROUPS * VECTORS, C::THREADS);
  const int item = in_order(block, blocks) * C::THREADS + threadIdx.x;
  const int col = item % VECTORS * V, group = item / VECTORS;
  const bool active = group < C::IMAGES * C::P * GROUPS;
  const int n = active ? group / (C::P * GROUPS) : 0;
  int ys[2];
  float down[2];
  Axis::place(group / GROUPS % C::P, C::SCALE_H, C::HEIGHT, ys, down);
  const Columns where(group % GROUPS * ACROSS);

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Packed<typename C::Element, V> pixels[COUNT][2];
#pragma unroll
  for (int x = 0; x < COUNT; ++x) {
    const int column = max_of(0, min_of(where.first() + x, C::WIDTH - 1));
#pragma unroll
    for (int y = 0; y < 2; ++y) pixels[x][y] = load_packed<V>(image.at(n, ys[y], column, col));
  }
  Vec<float, V> columns[COUNT];
#pragma unroll
  for (int x = 0; x < COUNT; ++x) {
    const auto upper = unpack<V>(pixels[x][0]), lower = unpack<V>(pixels[x][1]);
#pragma unroll
    for (int i = 0; i < V; ++i) columns[x][i] = fmaf(down[1], lower[i], down[0] * upper[i]);
  }
#pragma unroll
  for (int j = 0; j < ACROSS; ++j) {
    const int row = group * ACROSS + j;
    const auto acc = where.template between<V>(columns, j);
    typename Functor::Row values{};
    if constexpr (Functor::ROW_VALUES > 0) {
      if (active) values = functor.row_values(row, true);
    }
    const auto inputs = functor.template inputs<V>(row, col, active);
    functor.template operator()<V>(row, col, values, active, inputs, acc);
  }
}

}  // namespace gtco
