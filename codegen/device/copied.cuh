// What an epilogue reads at every row and column of its results, such as a residual: the copy
// engine brings it to shared memory in parts of some columns, ahead of the threads that want it.
#pragma once

#include "vector.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
struct NoImage {
  static constexpr int RINGS = 0, SLOTS = 0;
};

// RINGS of SLOTS parts each begin at byte AT, a multiple of 1024.
template <class T_, int RINGS_, int SLOTS_, int AT_>
struct Image {
  using T = T_;
  static constexpr int RINGS = RINGS_, SLOTS = SLOTS_, AT = AT_;
  static_assert(AT % 1024 == 0, "a swizzle repeats after 1024 bytes");
  const ptx::TensorMap* map;
};

// ROWS rows and COLUMNS columns of an image, as boxes of 32 columns. Eight lanes that read two rows
// of a box meet no bank twice: rows of 32 and 64 bytes lie side by side, of 128 they are swizzled.
template <class T, int ROWS, int COLUMNS>
struct CopiedPart {
  static constexpr int BOX = 32, CHUNK = 16 / sizeof(T);  // elements
  static constexpr int BOX_BYTES = ROWS * BOX * static_cast<int>(sizeof(T));
  static constexpr int BYTES = COLUMNS / BOX * BOX_BYTES;
  static_assert(COLUMNS % BOX == 0, "whole boxes");

  const unsigned char* part;
  int row0, col0;  // of its first element

  __device__ __forceinline__ static void copy(u32 to, const ptx::TensorMap& map, int row, int col,
                                              u32 barrier) {
    ptx::mbarrier_arrive_expect_tx(barrier, BYTES);
#pragma unroll
    for (int i = 0; i < COLUMNS / BOX; ++i)
      ptx::cp_async_bulk_tensor(to + i * BOX_BYTES, map, col + i * BOX, row, 0, barrier);
  }

  template <int V>
  __device__ __forceinline__ Packed<T, V> load(int row, int col) const {
    const int r = row - row0, c = col - col0;
    const auto* line = reinterpret_cast<const T*>(part + c / BOX * BOX_BYTES) + r * BOX;
    if constexpr (sizeof(T) == 1) {
      return load_packed<V>(line + c % BOX);
    } else {
      static_assert(V % CHUNK == 0, "whole chunks");
      const int swizzle = BOX / CHUNK == 8 ? r & 7 : 0;
      Packed<T, V> result;
#pragma unroll
      for (int i = 0; i < V; i += CHUNK) {
        const int chunk = (c % BOX + i) / CHUNK ^ swizzle;
        const Packed<T, CHUNK> loaded = load_packed<CHUNK>(line + chunk * CHUNK);
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) result.data[i + j] = loaded.data[j];
      }
      return result;
    }
  }
};
#endif

}  // namespace gtco
