// Windows of images whose channels do not mix: depthwise convolution, maximum, mean. A thread has V
// channels of STRIP windows that are neighbours along the width; what several of them read is
// loaded once.
//
// Config: Element, IMAGES, HEIGHT, WIDTH, COLUMNS (channels), STRIP, THREADS, and the window fields
// of windows.cuh. Image has `at(image, y, x, channel)`. Tap has the type that a window is reduced
// in:
//   start()                       of a sum or maximum
//   outside()                     what a pixel beyond the image counts as
//   weights(kh, kw, channel)      loaded once for a strip
//   add(sum, pixel, weights)
//   finish(sum, y, x)             of the window that begins at (y, x)
#pragma once

#include "epilogue.cuh"
#include "windows.cuh"

namespace gtco {

// Of a tap that weighs nothing.
struct NoWeights {
  __device__ __forceinline__ float operator[](int) const { return 0.0f; }
};

template <class C, class Image, class Tap, class Functor>
__device__ __forceinline__ void stencil(const Image& image, const Tap& tap,
                                        const Functor& functor) {
  constexpr int V = Functor::VECTOR;
  constexpr int VECTORS = ceil_div(C::COLUMNS, V), STRIPS = ceil_div(C::Q, C::STRIP);
  static_assert(C::COLUMNS % V == 0, "a vector does not cross a pixel's end");
  constexpr int SPAN = (C::STRIP - 1) * C::STRIDE_W + (C::KERNEL_W - 1) * C::DILATION_W + 1;
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int item = blockIdx.x * C::THREADS + threadIdx.x;
  const int col = item % VECTORS * V, q0 = item / VECTORS % STRIPS * C::STRIP;
  const int line = item / (VECTORS * STRIPS);  // of the result: P of each image
  const bool on = line < C::IMAGES * C::P;
  const int n = line / C::P, y0 = line % C::P * C::STRIDE_H - C::BEFORE_H;
  const int x0 = q0 * C::STRIDE_W - C::BEFORE_W;

  Vec<float, V> sums[C::STRIP];
#pragma unroll
  for (int s = 0; s < C::STRIP; ++s) sums[s] = map<V>([&](int) { return tap.start(); });
#pragma unroll
  for (int kh = 0; kh < C::KERNEL_H; ++kh) {
    const int y = y0 + kh * C::DILATION_H;
    const bool inside = on && y >= 0 && y < C::HEIGHT;
    Vec<float, V> pixels[SPAN];  // those between the taps of a dilated kernel are not loaded
#pragma unroll
    for (int i = 0; i < SPAN; ++i) {
      const int x = x0 + i;
      const bool there = inside && x >= 0 && x < C::WIDTH;
      // Not behind a condition: loads in branches of their own wait for each other.
      const auto pixel = load<V>(there ? image.at(n, y, x, col) : image.base);
      pixels[i] = map<V>([&](int k) { return there ? pixel[k] : tap.outside(); });
    }
#pragma unroll
    for (int kw = 0; kw < C::KERNEL_W; ++kw) {
      const auto weights = tap.template weights<V>(kh, kw, col);
#pragma unroll
      for (int s = 0; s < C::STRIP; ++s)
#pragma unroll
        for (int i = 0; i < V; ++i)
          sums[s][i] =
              tap.add(sums[s][i], pixels[s * C::STRIDE_W + kw * C::DILATION_W][i], weights[i]);
    }
  }
#pragma unroll
  for (int s = 0; s < C::STRIP; ++s) {
    const int row = line * C::Q + q0 + s;
    const bool active = on && q0 + s < C::Q;
    typename Functor::Row values{};
    if constexpr (Functor::ROW_VALUES > 0) {
      if (active) values = functor.row_values(row, true);
    }
    const auto acc =
        map<V>([&](int i) { return tap.finish(sums[s][i], y0, x0 + s * C::STRIDE_W); });
    const auto inputs = functor.template inputs<V>(row, col, active);
    functor.template operator()<V>(row, col, values, active, inputs, acc);
  }
}

}  // namespace gtco
