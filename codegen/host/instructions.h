// The calls of a kernel to the machine that runs it: one a PTX instruction, by the thread that
// runs.
#pragma once

#include "cuda_host.h"
#include "types.cuh"

namespace gtco {
// The shared memory of the block that runs; those of its cluster's other blocks are kept aside.
extern unsigned char smem[];

namespace ptx {
// What the driver encodes for the GPU, as the runner writes it for us: dimensions beyond its own
// are of one element.
struct alignas(64) TensorMap {
  u64 base;
  i64 sizes[5], strides[4];  // elements; bytes, of all dimensions but the innermost
  i32 box[5], element_bytes, swizzle_bytes, dimensions;
  // Where windows begin, width first: of the first one, of the last one beyond the image's end, and
  // from one to the next (5.5.4 of the PTX manual, im2col mode).
  signed char windows, lower[3], upper[3], stride[3];
  bool rounds;  // f32 to tf32
  u8 rest[5];
};

// Where a box begins: an element of each dimension; of windows, which of their pixels it takes.
struct Place {
  i32 at[5];
  i32 tap[3] = {0, 0, 0};
};
static_assert(sizeof(TensorMap) == 128, "as large as the GPU's");
}  // namespace ptx
}  // namespace gtco

namespace host {

using gtco::u32;
using gtco::u64;
using gtco::ptx::Place;
using gtco::ptx::TensorMap;

enum class Type { F16, BF16, TF32, E4M3, S8 };

float e4m3(unsigned char bits);

// `line` is where the kernel says it: the lanes of a warp meet at one barrier, not at two.
void sync_threads(int line);
void sync_warp();
void shuffle_xor(const void* mine, void* theirs, int bytes, int offset, u32 mask);

const void* assume_aligned(const void* p, int bytes);
u32 shared_address(const void* p);
void ldmatrix(u32* r, u32 address, bool trans);
void mma(void* d, const u32* a, u32 b0, u32 b1, Type type);

void ld_global(void* to, const void* from, int bytes);
void cp_async(u32 to, const void* from, int bytes, bool valid);
void cp_async_commit();
void cp_async_wait(int pending);

void griddepcontrol_wait();
void fence_proxy_async();

void mbarrier_init(u32 address, u32 arrivals);
void mbarrier_arrive(u32 address, bool release);
void mbarrier_arrive_expect_tx(u32 address, u32 bytes);
void mbarrier_wait(u32 address, u32 parity);
void bulk_copy(u32 to, const TensorMap& map, int dimensions, const Place& place, u32 barrier,
               u32 blocks);
void bulk_prefetch(const void* from, u32 bytes);
void bulk_copy_to_cluster(u32 to, u32 from, u32 bytes, u32 barrier);
void st_async(u32 to, const void* values, int bytes, u32 barrier);

void cluster_arrive(bool release);
void cluster_wait();
u32 block_rank();
u32 mapa(u32 address, u32 rank);

void wgmma_fence();
void wgmma(void* d, int n, u64 a, u64 b, bool by_rows, bool accumulate, Type type);
void wgmma_from_registers(float* d, int n, const u32* a, u64 b, bool by_rows, bool accumulate,
                          Type type);
void wgmma_commit();
void wgmma_wait(int pending);

}  // namespace host

// A compiler may split a vector's load into its elements, which are always aligned.
#define __builtin_assume_aligned(p, bytes) host::assume_aligned(p, bytes)
__forceinline__ void __syncthreads(int line = __builtin_LINE()) { host::sync_threads(line); }
__forceinline__ void __syncwarp() { host::sync_warp(); }

template <class T>
__forceinline__ T __shfl_xor_sync(unsigned mask, T x, int offset) {
  T r;
  host::shuffle_xor(&x, &r, sizeof x, offset, mask);
  return r;
}
