// wgmma's sides as GEMM kernels bring them to shared memory: in rows of the result, each with 128
// bytes of K, or in rows of K, each with 128 bytes of rows of the result. The N side of 16 bits may
// lie in rows of K (`BY_ROWS`), and of floats, which go through registers, the M side
// (`P_BY_ROWS`).
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

// Whether all products of the batch have one A.
template <class C, class = void>
struct IsShared : Constant<bool, false> {};
template <class C>
struct IsShared<C, decltype(static_cast<void>(C::SHARED))> : Constant<bool, C::SHARED> {};

// Brings squares of 128 bytes x 128 bytes of K in rows of K, of rows from `first` on, to `to`.
template <class Element, int ROWS>
__device__ __forceinline__ void copy_rows_of_k(u32 to, const ptx::TensorMap& map, int k, int first,
                                               int batch, u32 barrier) {
  constexpr int SIDE = 128 / sizeof(Element);
#pragma unroll
  for (int i = 0; i < ROWS / SIDE; ++i)
    ptx::cp_async_bulk_tensor(to + i * SIDE * 128, map, first + i * SIDE, k, batch, barrier);
}

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
      copy_rows_of_k<Element, N>(to, map, k, first, batch, barrier);
    } else {
      ptx::cp_async_bulk_tensor(to, map, k, first, batch, barrier);
    }
  }
};
#endif

}  // namespace gtco
