// The windows of images as rows of a matrix that nobody stores: row (image, p, q) of N x P x Q, K
// tap by tap and along each tap's channels.
//
// A window struct has the constants P, Q (windows of an image, along height and width), KERNEL_H,
// KERNEL_W, STRIDE_H, STRIDE_W, BEFORE_H, BEFORE_W (zeros around the image), DILATION_H, DILATION_W
// and CHANNELS.
#pragma once

#include "ptx.cuh"

namespace gtco {

template <class T, class = void>
struct IsWindows : Constant<bool, false> {};
template <class T>
struct IsWindows<T, decltype(static_cast<void>(T::KERNEL_H))> : Constant<bool, true> {};

// Whether T is a window struct.
template <class T>
inline constexpr bool is_windows = IsWindows<T>::value;

struct Pixel {
  int image, y, x, channel;  // y and x may lie outside the image

  __device__ __forceinline__ bool inside(int height, int width) const {
    return static_cast<u32>(y) < static_cast<u32>(height) &&
           static_cast<u32>(x) < static_cast<u32>(width);
  }
};

// The first tap of the window at `row`.
template <class W>
__device__ __forceinline__ Pixel first_pixel(int row) {
  const int image = row / (W::P * W::Q), rest = row % (W::P * W::Q);
  return {image, rest / W::Q * W::STRIDE_H - W::BEFORE_H, rest % W::Q * W::STRIDE_W - W::BEFORE_W,
          0};
}

// Element k of the window at `row`.
template <class W>
__device__ __forceinline__ Pixel pixel_of(int row, int k) {
  Pixel at = first_pixel<W>(row);
  const int tap = k / W::CHANNELS;
  at.y += tap / W::KERNEL_W * W::DILATION_H;
  at.x += tap % W::KERNEL_W * W::DILATION_W;
  at.channel = k % W::CHANNELS;
  return at;
}

// In place of a window struct: rows as they lie in memory.
struct PlainRows {};

// Steps of ATOMS x ATOM_K elements of K. Of windows, each atom lies in one tap: where the channels
// are no multiple of ATOM_K, the copy engine fills the rest of a tap's last atom with zeros.
template <class W, int ATOM_K, int ATOMS>
__device__ constexpr int steps_of_k(int k) {
  if constexpr (is_windows<W>) {
    constexpr int ALL = W::KERNEL_H * W::KERNEL_W * ceil_div(W::CHANNELS, ATOM_K);
    static_assert(ALL % ATOMS == 0, "the last step would run into a tap that is not there");
    return ALL / ATOMS;
  } else {
    return ceil_div(k, ATOM_K * ATOMS);
  }
}

#if __CUDA_ARCH__ >= 900
// Brings atoms of the windows from `row` on.
template <class W, int ATOM_K>
class CopyOfWindows {
 public:
  __device__ __forceinline__ explicit CopyOfWindows(int row) : first_(first_pixel<W>(row)) {}

  // Where atom `i` of K lies along a row of weights.
  __device__ __forceinline__ int k(int i) const {
    return i / CHUNKS * W::CHANNELS + i % CHUNKS * ATOM_K;
  }

  // To this block, or to the first BLOCKS of its cluster.
  template <int BLOCKS = 1>
  __device__ __forceinline__ void copy(u32 to, const ptx::TensorMap& map, int i,
                                       u32 barrier) const {
    const int tap = i / CHUNKS, channel = i % CHUNKS * ATOM_K;
    const int tap_w = tap % W::KERNEL_W * W::DILATION_W, tap_h = tap / W::KERNEL_W * W::DILATION_H;
    if constexpr (BLOCKS > 1) {
      ptx::cp_async_bulk_tensor_im2col_multicast(to, map, channel, first_.x, first_.y, first_.image,
                                                 tap_w, tap_h, barrier, (1 << BLOCKS) - 1);
    } else {
      ptx::cp_async_bulk_tensor_im2col(to, map, channel, first_.x, first_.y, first_.image, tap_w,
                                       tap_h, barrier);
    }
  }

 private:
  static constexpr int CHUNKS = ceil_div(W::CHANNELS, ATOM_K);  // of a tap
  Pixel first_;
};

template <int ATOM_K>
class CopyOfWindows<PlainRows, ATOM_K> {
 public:
  __device__ __forceinline__ explicit CopyOfWindows(int) {}
};
#endif

}  // namespace gtco
