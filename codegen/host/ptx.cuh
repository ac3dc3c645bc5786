// The device library's ptx.cuh for a CPU: each instruction's meaning, from the PTX ISA manual 9.0.
// Copies by cp.async arrive as late as the waits allow, so that a wait too few shows.
#pragma once

#include "cuda_host.h"
#include "types.cuh"

namespace gtco::ptx {

inline float cvt_f32(half_t x) { return static_cast<float>(bit_cast_to<_Float16>(x.bits)); }
inline float cvt_f32(bf16_t x) { return __uint_as_float(u32(x.bits) << 16); }
inline half_t cvt_f16(float x) { return {bit_cast_to<u16>(static_cast<_Float16>(x))}; }
inline bf16_t cvt_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class T>
u32 cvt_pack(float low, float high) {
  if constexpr (is_same<T, half_t>) return cvt_f16(low).bits | u32(cvt_f16(high).bits) << 16;
  return cvt_bf16(low).bits | u32(cvt_bf16(high).bits) << 16;
}

inline float ex2(float x) { return std::exp2(x); }
inline float max_nan(float x, float y) { return x != x || x > y ? x : y; }
inline float min_nan(float x, float y) { return x != x || x < y ? x : y; }

inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const unsigned char*>(p) - smem) | u32(host::rank())
                                                                             << host::RANK_SHIFT;
}

// Lane l gets elements (l / 4, l % 4 * 2) and the next of each matrix; lanes 8 j to 8 j + 7 give
// the rows of matrix j.
inline void ldmatrix(u32 (&r)[4], u32 address, bool trans) {
  if (address % 16) host::fail("ldmatrix at an address that is no multiple of 16");
  const int lane = host::current % 32;
  host::shown<u32>(lane) = address;
  host::meet(host::warp());
  for (int j = 0; j < 4; ++j) {
    u16 pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = trans ? lane % 4 * 2 + e : lane / 4;
      const int column = trans ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], host::shared(host::shown<u32>(j * 8 + row)) + column * 2, 2);
    }
    r[j] = pair[0] | u32(pair[1]) << 16;
  }
  host::meet(host::warp());
}
inline void ldmatrix_x4(u32 (&r)[4], u32 address) { ldmatrix(r, address, false); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { ldmatrix(r, address, true); }

template <int BYTES>
void cp_async(u32 to_shared, const void* from_global, bool valid) {
  if (to_shared % BYTES || reinterpret_cast<u64>(from_global) % BYTES)
    host::fail("cp.async between addresses that are not aligned");
  host::threads[host::current].open.push_back(
      {host::shared(to_shared), valid ? from_global : nullptr, BYTES});
}

inline void cp_async_commit() {
  host::Thread& thread = host::threads[host::current];
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

template <int PENDING>
void cp_async_wait() {
  auto& groups = host::threads[host::current].groups;
  while (static_cast<int>(groups.size()) > PENDING) {
    for (const host::Copy& copy : groups.front()) {
      if (copy.from) {
        std::memcpy(copy.to, copy.from, copy.bytes);
      } else {
        std::memset(copy.to, 0, copy.bytes);
      }
    }
    groups.erase(groups.begin());
  }
}

template <class T>
float unpack(u32 pair, int which) {
  return cvt_f32(T{static_cast<u16>(which ? pair >> 16 : pair)});
}

// A: register i is rows (i % 2) * 8 + l / 4, k (i / 2) * 8 + l % 4 * 2; B: register i is k
// i * 8 + l % 4 * 2, column l / 4; D: registers 2 i are rows i * 8 + l / 4, column l % 4 * 2.
template <class T>
void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Fragment {
    u32 a[4], b[2];
  };
  const int lane = host::current % 32;
  host::shown<Fragment>(lane) = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
  host::meet(host::warp());
  for (int j = 0; j < 4; ++j) {
    const int row = j / 2 * 8 + lane / 4, column = lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; ++k) {
      const int from = k % 8 / 2;
      const auto& left = host::shown<Fragment>(row % 8 * 4 + from);
      const auto& right = host::shown<Fragment>(column * 4 + from);
      d[j] += unpack<T>(left.a[row / 8 + k / 8 * 2], k % 2) * unpack<T>(right.b[k / 8], k % 2);
    }
  }
  host::meet(host::warp());
}

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

template <int THREADS>
void bar_sync(int id) {
  host::Meeting& meeting = host::blocks[host::rank()].named[id];
  if (meeting.size == 0) meeting.size = THREADS;
  if (meeting.size != THREADS) host::fail("bar.sync with two thread counts");
  host::meet(meeting);
}

inline void mbarrier_init(u32 address, u32 arrivals) {
  host::barriers[address] = {int(arrivals), int(arrivals), 0, 0};
}
inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(u32 address) {
  host::Barrier& barrier = host::barrier(address);
  if (barrier.pending == 0) host::fail("an mbarrier with more arrivals than it expects");
  --barrier.pending;
  host::settle(barrier);
}
inline void mbarrier_arrive_cluster(u32 address) { mbarrier_arrive(address); }

inline void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
  host::barrier(address).bytes += bytes;
  mbarrier_arrive(address);
}

inline void mbarrier_wait(u32 address, u32 parity) {
  while (host::barrier(address).phase == parity) host::yield();
}

// What the driver encodes for the GPU, as the runner writes it for us.
struct alignas(64) TensorMap {
  u64 base;
  i64 sizes[3], strides[2];  // elements; bytes
  i32 box[3], element_bytes, swizzle_bytes;
  u8 rest[48];
};
static_assert(sizeof(TensorMap) == 128, "as large as the GPU's");

inline void prefetch_tensormap(const TensorMap&) {}
inline void cp_async_bulk_prefetch(const void*, u32) {}

// 128-byte swizzle: the 16-byte chunk of an address moves by the row of 128 bytes it is in.
inline u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

inline void land(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
  const int row_bytes = map.box[0] * map.element_bytes;
  for (int row = 0; row < map.box[1]; ++row)
    for (int column = 0; column < map.box[0]; ++column) {
      const u32 at = to + row * row_bytes + column * map.element_bytes;
      unsigned char* target = host::shared(map.swizzle_bytes == 128 ? swizzled(at) : at);
      const bool inside = x + column < map.sizes[0] && y + row < map.sizes[1] && z < map.sizes[2];
      const i64 from =
          (x + column) * i64(map.element_bytes) + (y + row) * map.strides[0] + z * map.strides[1];
      if (inside) {
        std::memcpy(target, reinterpret_cast<const u8*>(map.base) + from, map.element_bytes);
      } else {
        std::memset(target, 0, map.element_bytes);
      }
    }
  host::Barrier& counted = host::barrier(barrier);
  counted.bytes -= row_bytes * map.box[1];
  host::settle(counted);
}

inline void cp_async_bulk_tensor(u32 to, const TensorMap& map, int x, int y, int z, u32 barrier) {
  if (map.swizzle_bytes == 128 && (to % 1024 || map.box[0] * map.element_bytes != 128))
    host::fail("a swizzled tile is not a row of 128 bytes at a multiple of 1024");
  host::transfers.push_back([=, &map] { land(to, map, x, y, z, barrier); });
  ++host::progress;
}

constexpr u32 OFFSET = (1u << host::RANK_SHIFT) - 1;

inline u32 mapa(u32 address, u32 rank) { return (address & OFFSET) | rank << host::RANK_SHIFT; }

inline void cp_async_bulk_tensor_multicast(u32 to, const TensorMap& map, int x, int y, int z,
                                           u32 barrier, u16 blocks) {
  for (u32 rank = 0; rank < 16; ++rank)
    if (blocks >> rank & 1) cp_async_bulk_tensor(mapa(to, rank), map, x, y, z, mapa(barrier, rank));
}

inline void barrier_cluster_arrive() {
  host::threads[host::current].cluster_round = host::cluster.round;
  host::arrive(host::cluster);
}
inline void barrier_cluster_arrive_relaxed() { barrier_cluster_arrive(); }
inline void barrier_cluster_wait() {
  while (host::cluster.round == host::threads[host::current].cluster_round) host::yield();
}

inline void fence_proxy_async() {}

inline void cp_async_bulk_to_cluster(u32 to, u32 from, u32 bytes, u32 barrier) {
  if (to % 16 || from % 16 || bytes % 16)
    host::fail("cp.async.bulk between addresses or of a size that is no multiple of 16");
  const u32 mine = mapa(from & OFFSET, host::rank());
  host::transfers.push_back([=] {
    std::memcpy(host::shared(to), host::shared(mine), bytes);
    host::Barrier& counted = host::barrier(barrier);
    counted.bytes -= bytes;
    host::settle(counted);
  });
  ++host::progress;
}

}  // namespace gtco::ptx
