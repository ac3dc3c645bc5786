// Convolutions whose blocks copy each pixel of their windows once, border included: all taps read
// it from shared memory, where a tap is an offset. Rows are the TILE_T x TILE_H x TILE_W results of
// a patch, one patch after another.
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

// Where the pixels of a patch lie that its windows read, and where patches do. In PLANES, columns a
// stride apart are neighbours, so that those of a tap's windows are.
template <class C, class Windows, bool PLANES>
struct Patch {
  using W = Volume<Windows>;
  static constexpr int CHUNK = 16 / sizeof(typename C::Element);  // elements
  static constexpr int CHUNKS = W::CHANNELS / CHUNK;
  static constexpr int ROWS = W::KERNEL_T * W::KERNEL_H, TAPS = ROWS * W::KERNEL_W;
  static constexpr int DEEP = (C::TILE_T - 1) * W::STRIDE_T + (W::KERNEL_T - 1) * W::DILATION_T + 1;
  static constexpr int HIGH = (C::TILE_H - 1) * W::STRIDE_H + (W::KERNEL_H - 1) * W::DILATION_H + 1;
  static constexpr int WIDE = (C::TILE_W - 1) * W::STRIDE_W + (W::KERNEL_W - 1) * W::DILATION_W + 1;
  static constexpr int PIXELS = DEEP * HIGH * WIDE;
  static constexpr int PHASE = ceil_div(WIDE, W::STRIDE_W);
  static constexpr int PITCH = PLANES ? W::STRIDE_W * PHASE : WIDE;
  static constexpr int DOWN = ceil_div(W::P, C::TILE_H), ACROSS = ceil_div(W::Q, C::TILE_W);
  static constexpr int FRAMES = ceil_div(W::O, C::TILE_T);

  __host__ __device__ static constexpr int column(int x) {
    return PLANES ? x % W::STRIDE_W * PHASE + x / W::STRIDE_W : x;
  }
  __host__ __device__ static constexpr int pixel(int t, int y, int x) {
    return (t * HIGH + y) * PITCH + column(x);
  }
  // Of a tap, how far it lies from the window's first pixel.
  __host__ __device__ static constexpr int tap(int at) {
    const int t = at / (W::KERNEL_H * W::KERNEL_W), y = at / W::KERNEL_W % W::KERNEL_H;
    return pixel(t * W::DILATION_T, y * W::DILATION_H, at % W::KERNEL_W * W::DILATION_W);
  }
  // The result at row `r`: neighbours of a line, then the lines below, so that the 16 rows of a
  // fragment are one line and the next fragment is the line below, where a patch is as wide.
  static constexpr int LINE = min_of(16, C::TILE_W);
  __host__ __device__ static constexpr int x_of(int r) {
    return r % LINE + r / (LINE * C::TILE_H) % (C::TILE_W / LINE) * LINE;
  }
  __host__ __device__ static constexpr int y_of(int r) { return r / LINE % C::TILE_H; }
  __host__ __device__ static constexpr int t_of(int r) { return r / (C::TILE_H * C::TILE_W); }
  // Of the window of row `r`; of rows that have no bit in common, their sum is that of both.
  __host__ __device__ static constexpr int first_pixel(int r) {
    return (t_of(r) * W::STRIDE_T * HIGH + y_of(r) * W::STRIDE_H) * PITCH +
           x_of(r) * (PLANES ? 1 : W::STRIDE_W);
  }

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
    using Patch = gtco::Patch<C, Windows, true>;
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
  // Of 16 pixels of a line, which 16 rows are; they divide the lines of an image.
  __device__ __forceinline__ int box() const { return row(result(0)) / 16; }
};

// The epilogue of patches, by the threads that have the `sums` of Products: FRAGMENTS of 16 rows x
// COLUMNS columns, of which PARTS have the same rows, and the first `row` and `column` of each. A
// thread may have REGISTERS, and LOOP of them are taken while it multiplies.
template <int REGISTERS, class C, class Windows, class Products, class Functor>
class PatchEpilogue {
  static constexpr bool INSIDE = C::N % C::BLOCK_N == 0;
  using Fragment =
      FragmentEpilogue<C::WIDTH, Products::COLUMNS, INSIDE, Functor, PatchRows<C, Windows>>;
  using Fetched = typename Fragment::Fetched;
  // What differs by column alone is fetched once; of rows, that of a fragment ahead of its turn;
  // where the loop leaves registers for it.
  static constexpr bool BY_ROW = Functor::INPUTS_BY_ROW;
  static constexpr int SLOTS = BY_ROW ? 1 : Products::PARTS, FREE = REGISTERS - Products::LOOP;
  static constexpr bool AHEAD = FREE * 4 >= SLOTS * static_cast<int>(sizeof(Fetched));

 public:
  static_assert(Functor::ROW_VALUES == 0, "no row of a patch is prepared for");

  __device__ __forceinline__ PatchEpilogue(const Functor& functor, const Products& products,
                                           int group, int n0)
      : functor_(functor),
        products_(products),
        first_((IsGrouped<C>::value ? group * C::N : 0) + n0),
        end_((IsGrouped<C>::value ? group * C::N : 0) + C::N) {}

  // Ahead of all patches.
  __device__ __forceinline__ void begin() {
    if constexpr (AHEAD && !BY_ROW) {
#pragma unroll
      for (int i = 0; i < SLOTS; ++i) fetched_[i] = fragment(0, i).fetch();
    }
  }
  // Ahead of the last products of a patch.
  __device__ __forceinline__ void fetch(int patch) {
    if constexpr (AHEAD && BY_ROW) fetched_[0] = fragment(patch, 0).fetch();
  }
  __device__ __forceinline__ void finish(int patch) {
#pragma unroll
    for (int i = 0; i < Products::FRAGMENTS; ++i) {
      Fetched& slot = fetched_[i % SLOTS];
      if constexpr (!AHEAD) slot = fragment(patch, i).fetch();
      const Fetched here = slot;
      if constexpr (AHEAD && BY_ROW) {
        if (i + 1 < Products::FRAGMENTS) slot = fragment(patch, i + 1).fetch();
      }
      float sums[Products::COLUMNS / 2];
      products_.sums(i, sums);
      fragment(patch, i).run(nullptr, here, sums);
    }
  }

 private:
  __device__ __forceinline__ Fragment fragment(int patch, int i) const {
    const PatchRows<C, Windows> rows{Patch<C, Windows, true>::origin(patch), products_.row(i)};
    return Fragment(functor_, rows, first_ + products_.column(i), end_);
  }

  const Functor& functor_;
  const Products& products_;
  const int first_, end_;
  Fetched fetched_[SLOTS];
};

}  // namespace gtco
