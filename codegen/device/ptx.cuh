// Thin wrappers, each named after the PTX instruction it issues. Inline assembly stands in this
// file and in wgmma.cuh and nowhere else. Section numbers are those of the PTX ISA manual 9.0.
#pragma once

#include "types.cuh"

namespace gtco::ptx {

// `x`, which is the same in all lanes of a warp, so that the assembler knows it (9.7.9.6
// shfl.sync).
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// -- conversions (9.7.9.21 cvt) ---------------------------------------------------------------

__device__ __forceinline__ float cvt_f32(half_t x) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
}

__device__ __forceinline__ float cvt_f32(bf16_t x) { return __uint_as_float(u32(x.bits) << 16); }

__device__ __forceinline__ half_t cvt_f16(float x) {
  half_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}

__device__ __forceinline__ bf16_t cvt_bf16(float x) {
  bf16_t r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}

__device__ __forceinline__ float cvt_f32(e4m3_t x) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(x.bits)));
  return cvt_f32(half_t{u16(halves)});
}

// Two floats as e4m3, `low` in the low byte; what is too large becomes 448.
__device__ __forceinline__ u16 cvt_e4m3x2(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}

// Both as signed bytes, what does not fit the nearest that does, below the low half of `upper`.
__device__ __forceinline__ u32 pack_s8(i32 low, i32 high, u32 upper) {  // 9.7.9.22 cvt.pack
  u32 r;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(high), "r"(low), "r"(upper));
  return r;
}

__device__ __forceinline__ i32 signed_byte(u32 word, int i) {  // 9.7.9.7 prmt, signs replicated
  i32 r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(word), "r"(0x8880 + 0x1111 * i));
  return r;
}

// Two floats packed into 32 bits, `low` in the low half.
template <class T>
__device__ __forceinline__ u32 cvt_pack(float low, float high);

template <>
__device__ __forceinline__ u32 cvt_pack<half_t>(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <>
__device__ __forceinline__ u32 cvt_pack<bf16_t>(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ float ex2(float x) {  // 9.7.3.21 ex2.approx
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float rcp(float x) {  // 9.7.3.13 rcp.approx.ftz
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float max_nan(float x, float y) {  // 9.7.3.12 max.NaN
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

__device__ __forceinline__ float min_nan(float x, float y) {  // 9.7.3.11 min.NaN
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

// -- device memory: 9.7.9.8 ld.global
// ----------------------------------------------------------------

// 16 bytes that one thread needs once, zeros where not `valid`. Not by the read-only path: the
// assembler moves such loads of constants behind the dependent-launch wait.
__device__ __forceinline__ void ld_global_v4(u32 (&r)[4], const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@valid ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

// 16, 8, 4 or 2 bytes; where not `valid`, they stay what they are. Of a load and a choice beside it
// the assembler makes loads into the same registers, each of which waits for the one before.
__device__ __forceinline__ void ld_global(u32 (&r)[4], const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %5, 0;\n"
      "@valid ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ void ld_global(u32 (&r)[2], const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %3, 0;\n"
      "@valid ld.global.v2.b32 {%0, %1}, [%2];\n"
      "}"
      : "+r"(r[0]), "+r"(r[1])
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ void ld_global(u32 (&r)[1], const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %2, 0;\n"
      "@valid ld.global.b32 %0, [%1];\n"
      "}"
      : "+r"(r[0])
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

__device__ __forceinline__ void ld_global(u16 (&r)[1], const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      "setp.ne.b32 valid, %2, 0;\n"
      "@valid ld.global.b16 %0, [%1];\n"
      "}"
      : "+h"(r[0])
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

// -- shared memory ---------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// 9.7.14.5.15 ldmatrix: four 8x8 matrices of 16-bit elements, one row address a lane.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// 9.7.9.25.3 cp.async: BYTES of 4, 8 or 16; the copy writes zeros where `valid` is false. Of 16
// bytes L1 keeps none, unless they are KEPT.
template <int BYTES, bool KEPT = (BYTES < 16)>
__device__ __forceinline__ void cp_async(u32 to_shared, const void* from_global, bool valid) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  const int size = valid ? BYTES : 0;
  static_assert(KEPT || BYTES == 16, "shorter copies go through L1");
  if constexpr (!KEPT) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from_global),
                 "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to_shared), "l"(from_global),
                 "r"(size), "n"(BYTES)
                 : "memory");
  }
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// -- tensor cores: 9.7.14.5.14 mma.sync ---------------------------------------------------------

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<half_t>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                     u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<bf16_t>(float (&d)[4], const u32 (&a)[4], u32 b0,
                                                     u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of e4m3 (sm_89).
__device__ __forceinline__ void mma_m16n8k32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Of 8-bit integers.
__device__ __forceinline__ void mma_m16n8k32(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 9.7.9.21 cvt: to the nearest of the tf32 values, ties away from zero. What mma.sync is given
// otherwise it cuts.
__device__ __forceinline__ u32 cvt_tf32(float x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
  return r;
}

// 9.7.4.3 mul, 9.7.4.4 fma: a register of operands of mma.sync times another, each product rounded.
template <class T>
__device__ __forceinline__ u32 multiply(u32 a, u32 b) {
  static_assert(sizeof(T) == 4, "one float");
  return __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
}

template <>
__device__ __forceinline__ u32 multiply<half_t>(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

template <>
__device__ __forceinline__ u32 multiply<bf16_t>(u32 a, u32 b) {
  u32 r;  // mul.bf16x2 is of sm_90; a product and -0 are the product
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000));
  return r;
}

__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// -- dependent launch: 9.7.13.13 griddepcontrol (sm_90) -------------------------------------------

// Until this returns, nothing an earlier kernel wrote may be read and nothing may be written.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// -- barriers -------------------------------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
// 9.7.19.5 setmaxnreg: a warpgroup as a whole gives registers back to its block, or takes as many
// as others have given back. The block's launch bounds must say how many it began with.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256, "what setmaxnreg takes");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// 9.7.13.15 mbarrier: 64 bits in shared memory that count arrivals and bytes.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes mbarrier.init visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at a barrier of any block of the cluster; `barrier` comes from mapa. It publishes nothing
// (release at cluster scope costs a fence of half a microsecond): for handing back what was read.
__device__ __forceinline__ void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\n"
      "bra again;\n"
      "ready:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// -- tensor memory access: 9.7.9.27.1.2 cp.async.bulk.tensor --------------------------------------

struct alignas(64) TensorMap {
  u8 bytes[128];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor(u32 to_shared, const TensorMap& map, int x,
                                                     int y, int z, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to_shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor(u32 to_shared, const TensorMap& map, int x,
                                                     int y, int z, int u, int v, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to_shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "r"(barrier)
      : "memory");
}

// 5.5.4, im2col mode: channels from `c` of a row of windows, of each the pixel at (tap_w, tap_h).
// The first window is the one that begins at (w, h) of image n.
__device__ __forceinline__ void cp_async_bulk_tensor_im2col(u32 to_shared, const TensorMap& map,
                                                            int c, int w, int h, int n, int tap_w,
                                                            int tap_h, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(to_shared),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"(static_cast<u16>(tap_w)),
      "h"(static_cast<u16>(tap_h))
      : "memory");
}

// The same of volumes.
__device__ __forceinline__ void cp_async_bulk_tensor_im2col(u32 to_shared, const TensorMap& map,
                                                            int c, int w, int h, int t, int n,
                                                            int tap_w, int tap_h, int tap_t,
                                                            u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], {%8, %9, %10};" ::"r"(to_shared),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(t), "r"(n), "r"(barrier), "h"(static_cast<u16>(tap_w)),
      "h"(static_cast<u16>(tap_h)), "h"(static_cast<u16>(tap_t))
      : "memory");
}

// 9.7.9.25.5.2 cp.async.bulk.prefetch: brings `bytes` (a multiple of 16) from device memory to L2.
__device__ __forceinline__ void cp_async_bulk_prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The same, into the same offset of every block of the cluster named in `blocks`; each of those
// blocks' barrier at `barrier`'s offset counts the bytes.
__device__ __forceinline__ void cp_async_bulk_tensor_multicast(u32 to_shared, const TensorMap& map,
                                                               int x, int y, int z, u32 barrier,
                                                               u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to_shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
}

// The same of windows.
__device__ __forceinline__ void cp_async_bulk_tensor_im2col_multicast(u32 to_shared,
                                                                      const TensorMap& map, int c,
                                                                      int w, int h, int n,
                                                                      int tap_w, int tap_h,
                                                                      u32 barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;" ::"r"(to_shared),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"(static_cast<u16>(tap_w)),
      "h"(static_cast<u16>(tap_h)), "h"(blocks)
      : "memory");
}

// The same of volumes.
__device__ __forceinline__ void cp_async_bulk_tensor_im2col_multicast(
    u32 to_shared, const TensorMap& map, int c, int w, int h, int t, int n, int tap_w, int tap_h,
    int tap_t, u32 barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], {%8, %9, %10}, %11;" ::"r"(
          to_shared),
      "l"(&map), "r"(c), "r"(w), "r"(h), "r"(t), "r"(n), "r"(barrier), "h"(static_cast<u16>(tap_w)),
      "h"(static_cast<u16>(tap_h)), "h"(static_cast<u16>(tap_t)), "h"(blocks)
      : "memory");
}

// -- clusters -------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_cluster_arrive() {  // 9.7.13.4 barrier.cluster
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

// Without release: for order of execution alone, not for what was written.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 9.7.9.24 mapa: the address of `address` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ u32 mapa(u32 address, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

// 9.7.9.25.5.1 cp.async.bulk: from this block's shared memory into that of a block of the cluster,
// whose barrier counts the bytes. `to` and `barrier` come from mapa.
__device__ __forceinline__ void cp_async_bulk_to_cluster(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// 9.7.9.12 st.async: two floats into the shared memory of a block of the cluster, whose barrier
// counts the 8 bytes. `to` and `barrier` come from mapa.
__device__ __forceinline__ void st_async(u32 to, float x, float y, u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "f"(x), "f"(y), "r"(barrier)
      : "memory");
}

// The same of four floats, 16 bytes.
__device__ __forceinline__ void st_async(u32 to, const float (&x)[4], u32 barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
      : "memory");
}

// 9.7.13.6 fence.proxy.async: shared memory written by stores becomes visible to the copy engine
// and to wgmma, and a buffer they have read may be written by stores.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

}  // namespace gtco::ptx
