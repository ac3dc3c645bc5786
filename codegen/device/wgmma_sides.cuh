// wgmma's N side as GEMM kernels bring it to shared memory: in rows of the result, each with 128
// bytes of K, or in rows of K (`BY_ROWS`), with 64 rows of the result each.
#pragma once

#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// Whether the configuration of a kernel says BY_ROWS.
template <class C, class = void>
struct IsByRows : Constant<bool, false> {};
template <class C>
struct IsByRows<C, decltype(static_cast<void>(C::BY_ROWS))> : Constant<bool, C::BY_ROWS> {};
template <class C>
inline constexpr bool is_by_rows = IsByRows<C>::value;

// The side of N rows of the result; an atom, 128 bytes of K, has N * 128 bytes.
template <class Element, int N, bool BY_ROWS>
struct NSide {
  static constexpr int SQUARE = 64 * 128;  // bytes of 64 rows of K

  // Multiplies P's tile by the 32 bytes of K from `k` on of atom `atom` of the tile at `tile`.
  __device__ __forceinline__ static void mma(sum_t<Element> (&sums)[N / 2], u64 p, u32 tile,
                                             int atom, int k, bool accumulate) {
    if constexpr (BY_ROWS) {
      static_assert(N % 64 == 0 && sizeof(Element) == 2, "whole rows of 16 bits");
      ptx::WgmmaOfRows<Element, N>::mma(
          sums, p, ptx::rows_descriptor<SQUARE>(tile, atom * N * 128 + k / 32 * 16 * 128),
          accumulate);
    } else {
      ptx::Wgmma<Element, N>::mma(sums, p, ptx::wgmma_descriptor(tile, atom * N * 128 + k),
                                  accumulate);
    }
  }

  // Brings an atom of one product, of rows from `first` on and K from `k` on, to `to`.
  __device__ __forceinline__ static void copy(u32 to, const ptx::TensorMap& map, int k, int first,
                                              int batch, u32 barrier) {
    if constexpr (BY_ROWS) {
#pragma unroll
      for (int i = 0; i < N / 64; ++i)
        ptx::cp_async_bulk_tensor(to + i * SQUARE, map, first + i * 64, k, batch, barrier);
    } else {
      ptx::cp_async_bulk_tensor(to, map, k, first, batch, barrier);
    }
  }
};
#endif

}  // namespace gtco
