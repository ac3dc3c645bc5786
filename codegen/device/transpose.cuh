// Pointwise kernels of an image whose channels lie apart in memory: a block brings pixels of each
// channel, which are neighbours, and takes the channels of each pixel out of shared memory.
//
// A tile is of 128 bytes of each of 8 V channels. Pieces of 16 bytes lie swizzled by the V channels
// that a thread has, so that the eight threads of a pixel read from banks of their own.
#pragma once

#include "order.cuh"
#include "stats.cuh"

namespace gtco {

// Config: Element, IMAGES, PIXELS (of an image, side by side), COLUMNS (channels), WIDTH (pixels of
// a load), THREADS. Image: at(n, channel, pixel). Rows of the functor are the pixels of all images.
template <class C, class Image, class Functor>
__device__ __forceinline__ void transpose(const Image& image, const Functor& functor) {
  using Element = typename C::Element;
  constexpr int V = Functor::VECTOR, W = C::WIDTH, CHUNK = 16 / sizeof(Element);
  constexpr int COLUMNS = 8 * V, PIXELS = 8 * CHUNK;
  constexpr int ACROSS = ceil_div(C::COLUMNS, COLUMNS), DOWN = ceil_div(C::PIXELS, PIXELS);
  constexpr int LOADED = COLUMNS * PIXELS / W, LOADS = ceil_div(LOADED, C::THREADS);
  constexpr int STORED = PIXELS * 8, STORES = ceil_div(STORED, C::THREADS);
  extern __shared__ __align__(1024) unsigned char smem[];
  Element* const tile = reinterpret_cast<Element*>(smem);  // (COLUMNS, PIXELS)
  const auto place = [](int column, int pixel) {
    return column * PIXELS + (pixel / CHUNK ^ column / V % 8) * CHUNK + pixel % CHUNK;
  };
  const int block = in_order(blockIdx.x, gridDim.x);
  const int first_column = block % ACROSS * COLUMNS;
  const int first_pixel = block / ACROSS % DOWN * PIXELS, n = block / (ACROSS * DOWN);

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  Packed<Element, W> loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int item = i * C::THREADS + threadIdx.x;
    const int column = first_column + item / (PIXELS / W);
    const int pixel = first_pixel + item % (PIXELS / W) * W;
    const bool active = item < LOADED && column < C::COLUMNS && pixel < C::PIXELS;
    loaded[i] = load_packed<W>(image.at(n, active ? column : 0, active ? pixel : 0), active);
  }
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int item = i * C::THREADS + threadIdx.x;
    if (item < LOADED)
      *reinterpret_cast<Packed<Element, W>*>(
          tile + place(item / (PIXELS / W), item % (PIXELS / W) * W)) = loaded[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < STORES; ++i) {
    const int item = i * C::THREADS + threadIdx.x;
    const int column = item % 8 * V, pixel = item / 8;
    const int col = first_column + column, row = n * C::PIXELS + first_pixel + pixel;
    const bool active = item < STORED && col < C::COLUMNS && first_pixel + pixel < C::PIXELS;
    if (!active) continue;
    const auto values = map<V>([&](int v) { return to_compute(tile[place(column + v, pixel)]); });
    typename Functor::Row of_row{};
    if constexpr (Functor::ROW_VALUES > 0) of_row = functor.row_values(row, true);
    const auto inputs = functor.template inputs<V>(row, col, true);
    functor.template operator()<V>(row, col, of_row, true, inputs, values);
  }
}

}  // namespace gtco
