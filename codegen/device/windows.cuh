// The windows of images as rows of a matrix that nobody stores: row (image, p, q) of N x P x Q, K
// tap by tap and along each tap's channels.
//
// A window struct has the constants P, Q (windows of an image, along height and width), KERNEL_H,
// KERNEL_W, STRIDE_H, STRIDE_W, BEFORE_H, BEFORE_W (zeros around the image), DILATION_H, DILATION_W
// and CHANNELS. That of volumes has O, KERNEL_T, STRIDE_T, BEFORE_T and DILATION_T too, along the
// frames, which come ahead of height and width everywhere. Where copies of 16 bytes and less gather
// it, it also has the image's SIZE_H, SIZE_W (SIZE_T) and `place`, where a pixel's channel lies.
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

template <class T, class = void>
struct IsVolume : Constant<bool, false> {};
template <class T>
struct IsVolume<T, decltype(static_cast<void>(T::KERNEL_T))> : Constant<bool, true> {};

// Whether its windows have frames.
template <class T>
inline constexpr bool is_volume = IsVolume<T>::value;

struct Pixel {
  int image, y, x, channel;  // y and x may lie outside the image
  int z = 0;                 // of a volume, the frame, likewise

  __device__ __forceinline__ bool inside(int height, int width) const {
    return static_cast<u32>(y) < static_cast<u32>(height) &&
           static_cast<u32>(x) < static_cast<u32>(width);
  }
  __device__ __forceinline__ bool inside(int frames, int height, int width) const {
    return static_cast<u32>(z) < static_cast<u32>(frames) && inside(height, width);
  }
};

// The first tap of the window at `row`.
template <class W>
__device__ __forceinline__ Pixel first_pixel(int row) {
  const int image = row / (W::P * W::Q), rest = row % (W::P * W::Q);
  Pixel first{image, rest / W::Q * W::STRIDE_H - W::BEFORE_H,
              rest % W::Q * W::STRIDE_W - W::BEFORE_W, 0};
  if constexpr (is_volume<W>) {
    first.z = image % W::O * W::STRIDE_T - W::BEFORE_T;
    first.image = image / W::O;
  }
  return first;
}

// How far tap k / CHANNELS of a window lies from its first, and which channel k is of.
template <class W>
__device__ __forceinline__ Pixel tap_of(int k) {
  int tap = k / W::CHANNELS;
  Pixel at{0, 0, 0, k % W::CHANNELS};
  if constexpr (is_volume<W>) {
    at.z = tap / (W::KERNEL_H * W::KERNEL_W) * W::DILATION_T;
    tap %= W::KERNEL_H * W::KERNEL_W;
  }
  at.y = tap / W::KERNEL_W * W::DILATION_H;
  at.x = tap % W::KERNEL_W * W::DILATION_W;
  return at;
}

// Element k of the window at `row`.
template <class W>
__device__ __forceinline__ Pixel pixel_of(int row, int k) {
  const Pixel first = first_pixel<W>(row), tap = tap_of<W>(k);
  return {first.image, first.y + tap.y, first.x + tap.x, tap.channel, first.z + tap.z};
}

template <class W>
__device__ __forceinline__ bool is_inside(const Pixel& at) {
  if constexpr (is_volume<W>)
    return at.inside(W::SIZE_T, W::SIZE_H, W::SIZE_W);
  else
    return at.inside(W::SIZE_H, W::SIZE_W);
}

// Which rows, columns and frames of taps lie inside the image: a bit each, of all kinds together.
template <class W>
struct TapBits {
  static constexpr int FRAMES = [] {
    if constexpr (is_volume<W>)
      return W::KERNEL_T;
    else
      return 0;
  }();
  static constexpr int COUNT = FRAMES + W::KERNEL_H + W::KERNEL_W;

  __device__ __forceinline__ static u32 of_window(int row) {
    const Pixel first = first_pixel<W>(row);
    u32 bits = 0;
    if constexpr (is_volume<W>) {
#pragma unroll
      for (int t = 0; t < W::KERNEL_T; ++t)
        bits |= is_below(first.z + t * W::DILATION_T, W::SIZE_T) << t;
    }
#pragma unroll
    for (int y = 0; y < W::KERNEL_H; ++y)
      bits |= is_below(first.y + y * W::DILATION_H, W::SIZE_H) << (FRAMES + y);
#pragma unroll
    for (int x = 0; x < W::KERNEL_W; ++x)
      bits |= is_below(first.x + x * W::DILATION_W, W::SIZE_W) << (FRAMES + W::KERNEL_H + x);
    return bits;
  }

  // The bits that tap k / CHANNELS needs.
  __device__ __forceinline__ static u32 of_tap(int k) {
    int tap = k / W::CHANNELS;
    u32 bits = 0;
    if constexpr (is_volume<W>) {
      bits = 1u << tap / (W::KERNEL_H * W::KERNEL_W);
      tap %= W::KERNEL_H * W::KERNEL_W;
    }
    return bits | 1u << (FRAMES + tap / W::KERNEL_W) |
           1u << (FRAMES + W::KERNEL_H + tap % W::KERNEL_W);
  }

 private:
  __device__ __forceinline__ static u32 is_below(int at, int size) {
    return static_cast<u32>(at) < static_cast<u32>(size) ? 1 : 0;
  }
};

// Rows of taps of a window, of all its frames.
template <class W>
__device__ constexpr int tap_rows_of() {
  if constexpr (is_volume<W>)
    return W::KERNEL_T * W::KERNEL_H;
  else
    return W::KERNEL_H;
}

// Rows of windows of an image, of all its frames.
template <class W>
__device__ constexpr int window_rows_of() {
  if constexpr (is_volume<W>)
    return W::O * W::P;
  else
    return W::P;
}

// In place of a window struct: rows as they lie in memory.
struct PlainRows {};

template <class T, class = void>
struct PiecesOf : Constant<int, 1> {};
template <class T>
struct PiecesOf<T, decltype(static_cast<void>(T::PIECES))> : Constant<int, T::PIECES> {};

// Of how many pieces an operand is. Windows or rows of several say how many `channels_of` each has;
// those of a tap come piece by piece.
template <class W>
inline constexpr int pieces_of = PiecesOf<W>::value;

// Where an atom of K lies: of which piece of which tap, at which of its channels, and where along a
// row of weights.
struct AtomPlace {
  int tap, piece, channel, k;
};

// The atoms of a tap: none is of two pieces, and the copy engine fills the last of each with zeros.
template <class W, int ATOM_K>
__host__ __device__ constexpr int atoms_of_tap() {
  if constexpr (pieces_of<W> > 1) {
    int atoms = 0;
    for (int piece = 0; piece < pieces_of<W>; ++piece)
      atoms += ceil_div(W::channels_of(piece), ATOM_K);
    return atoms;
  } else {
    return ceil_div(W::CHANNELS, ATOM_K);
  }
}

template <class W, int ATOM_K>
__device__ __forceinline__ AtomPlace atom_place(int i) {
  constexpr int ATOMS = atoms_of_tap<W, ATOM_K>();
  if constexpr (pieces_of<W> == 1) {
    const int channel = i % ATOMS * ATOM_K;
    return {i / ATOMS, 0, channel, i / ATOMS * W::CHANNELS + channel};
  } else {
    int tap = 0, before = 0;  // channels of the taps ahead
    if constexpr (is_windows<W>) {
      tap = i / ATOMS;
      before = tap * W::CHANNELS;
    }
    const int in_tap = i - tap * ATOMS;
    AtomPlace at{tap, 0, in_tap * ATOM_K, before + in_tap * ATOM_K};
    int atoms = 0, channels = 0;  // of the pieces ahead
#pragma unroll
    for (int piece = 1; piece < pieces_of<W>; ++piece) {
      atoms += ceil_div(W::channels_of(piece - 1), ATOM_K);
      channels += W::channels_of(piece - 1);
      if (in_tap >= atoms) {
        const int channel = (in_tap - atoms) * ATOM_K;
        at = {tap, piece, channel, before + channels + channel};
      }
    }
    return at;
  }
}

// Steps of ATOMS x ATOM_K elements of K. Of windows and pieces, each atom lies in one tap.
template <class W, int ATOM_K, int ATOMS>
__device__ constexpr int steps_of_k(int k) {
  if constexpr (!is_same<W, PlainRows>) {
    constexpr int ALL = [] {
      if constexpr (is_windows<W>)
        return tap_rows_of<W>() * W::KERNEL_W * atoms_of_tap<W, ATOM_K>();
      else
        return atoms_of_tap<W, ATOM_K>();
    }();
    static_assert(ALL % ATOMS == 0, "the last step would run into a tap that is not there");
    return ALL / ATOMS;
  } else {
    return ceil_div(k, ATOM_K * ATOMS);
  }
}

#if __CUDA_ARCH__ >= 900
// The tensor maps of an operand's pieces beside the first.
template <int COUNT>
struct MoreMaps {
  const ptx::TensorMap* of[COUNT];
};
template <>
struct MoreMaps<0> {};

// Brings atoms of the windows, or of rows in several pieces, from `row` on; of windows, those of
// the channels of `group`.
template <class W, int ATOM_K>
class CopyOfWindows {
 public:
  __device__ __forceinline__ explicit CopyOfWindows(int row, int group = 0)
      : first_(first_of(row)), group_(group) {}

  // Where atom `i` of K lies along a row of weights.
  __device__ __forceinline__ int k(int i) const { return atom_place<W, ATOM_K>(i).k; }

  // To this block, or to the first BLOCKS of its cluster.
  template <int BLOCKS = 1>
  __device__ __forceinline__ void copy(u32 to, const ptx::TensorMap& first,
                                       const MoreMaps<pieces_of<W> - 1>& more, int i,
                                       u32 barrier) const {
    const AtomPlace at = atom_place<W, ATOM_K>(i);
    const ptx::TensorMap* map = &first;
    if constexpr (pieces_of<W> > 1) {
#pragma unroll
      for (int piece = 1; piece < pieces_of<W>; ++piece)
        if (at.piece == piece) map = more.of[piece - 1];
    }
    if constexpr (!is_windows<W>) {
      if constexpr (BLOCKS > 1)
        ptx::cp_async_bulk_tensor_multicast(to, *map, at.channel, first_, 0, barrier,
                                            (1 << BLOCKS) - 1);
      else
        ptx::cp_async_bulk_tensor(to, *map, at.channel, first_, 0, barrier);
    } else {
      copy_tap<BLOCKS>(to, *map, at, barrier);
    }
  }

 private:
  __device__ __forceinline__ static auto first_of(int row) {
    if constexpr (is_windows<W>)
      return first_pixel<W>(row);
    else
      return row;
  }

  template <int BLOCKS>
  __device__ __forceinline__ void copy_tap(u32 to, const ptx::TensorMap& map, const AtomPlace& at,
                                           u32 barrier) const {
    int tap = at.tap, tap_t = 0;
    const int channel = group_ * W::CHANNELS + at.channel;
    if constexpr (is_volume<W>) {
      tap_t = tap / (W::KERNEL_H * W::KERNEL_W) * W::DILATION_T;
      tap %= W::KERNEL_H * W::KERNEL_W;
    }
    const int tap_w = tap % W::KERNEL_W * W::DILATION_W, tap_h = tap / W::KERNEL_W * W::DILATION_H;
    if constexpr (is_volume<W> && BLOCKS > 1) {
      ptx::cp_async_bulk_tensor_im2col_multicast(to, map, channel, first_.x, first_.y, first_.z,
                                                 first_.image, tap_w, tap_h, tap_t, barrier,
                                                 (1 << BLOCKS) - 1);
    } else if constexpr (is_volume<W>) {
      ptx::cp_async_bulk_tensor_im2col(to, map, channel, first_.x, first_.y, first_.z, first_.image,
                                       tap_w, tap_h, tap_t, barrier);
    } else if constexpr (BLOCKS > 1) {
      ptx::cp_async_bulk_tensor_im2col_multicast(to, map, channel, first_.x, first_.y, first_.image,
                                                 tap_w, tap_h, barrier, (1 << BLOCKS) - 1);
    } else {
      ptx::cp_async_bulk_tensor_im2col(to, map, channel, first_.x, first_.y, first_.image, tap_w,
                                       tap_h, barrier);
    }
  }

  decltype(first_of(0)) first_;  // a pixel, or a row
  int group_;
};

template <int ATOM_K>
class CopyOfWindows<PlainRows, ATOM_K> {
 public:
  __device__ __forceinline__ explicit CopyOfWindows(int, int = 0) {}
};
#endif

}  // namespace gtco
