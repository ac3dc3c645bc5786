// Just enough of CUDA C++ for a kernel to run on a CPU, one cluster of blocks after another. The
// threads of a cluster are fibers that switch only where they wait for one another; copies by the
// copy engine land when nobody else can go on, as late as the waits allow. A kernel that breaks a
// rule, or waits for ever, stops with a sentence that names block and thread.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __restrict__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n)

struct Index {
  int x, y, z;
};
inline Index threadIdx, blockIdx;

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace gtco {
// The shared memory of the block that runs; those of its cluster's other blocks are kept aside.
alignas(1024) unsigned char smem[256 * 1024];
}  // namespace gtco

namespace host {

constexpr std::size_t STACK = 256 * 1024;
constexpr unsigned RANK_SHIFT = 20;  // a shared address: the block's rank, then the offset

// A meeting of `size` threads that wait for one another again and again.
struct Meeting {
  int size = 0, arrived = 0;
  long round = 0;
};

// An mbarrier: a phase ends when its arrivals and its bytes are complete.
struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0;
  unsigned phase = 0;
};

struct Copy {
  void* to;
  const void* from;  // null for zeros
  int bytes;
};

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  unsigned char slot[64];                 // what this lane shows to its warp
  std::vector<std::vector<Copy>> groups;  // committed copies, oldest first
  std::vector<Copy> open;
  std::vector<std::vector<std::function<void()>>> products;  // committed wgmma groups
  std::vector<std::function<void()>> open_products;
  long cluster_round = 0;
};

struct Block {
  Index index;
  std::vector<unsigned char> memory;
  Meeting all;
  std::map<int, Meeting> named;
};

inline std::vector<Thread> threads;  // of all blocks of the cluster
inline std::vector<Meeting> warps;
inline std::vector<Block> blocks;
inline Meeting cluster;
inline std::map<unsigned, Barrier> barriers;
inline std::vector<std::function<void()>> transfers;  // of the copy engine, under way
inline ucontext_t scheduler;
inline int current, block_threads;
inline long progress;

inline std::string error;  // of the kernel, "" while it is right

inline int rank() { return current / block_threads; }
inline void yield() { swapcontext(&threads[current].context, &scheduler); }

// The first broken rule counts. A thread that broke one never goes on; where the copy engine did,
// the landing goes on and the cluster stops behind it.
inline void fail(const std::string& what) {
  const auto number = [](int x) { return std::to_string(x); };
  if (error.empty())
    error = "block (" + number(blockIdx.x) + ", " + number(blockIdx.y) + ", " + number(blockIdx.z) +
            "), thread " + number(threadIdx.x) + ": " + what;
  if (current >= 0) yield();
}

inline void arrive(Meeting& meeting) {
  ++progress;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    ++meeting.round;
  }
}

inline void meet(Meeting& meeting) {
  const long round = meeting.round;
  arrive(meeting);
  while (meeting.round == round) yield();
}

inline Meeting& warp() { return warps[current / 32]; }

// The byte at a shared address of any block of the cluster.
inline unsigned char* shared(unsigned address) {
  const unsigned owner = address >> RANK_SHIFT, offset = address & ((1u << RANK_SHIFT) - 1);
  if (owner >= blocks.size() || offset >= blocks[owner].memory.size()) {
    fail("an access outside shared memory");
    return gtco::smem;
  }
  return (int(owner) == rank() ? gtco::smem : blocks[owner].memory.data()) + offset;
}

inline void settle(Barrier& barrier) {
  ++progress;
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
  }
}

inline Barrier& barrier(unsigned address) {
  if (barriers.find(address) == barriers.end()) fail("an mbarrier that nobody initialised");
  return barriers[address];
}

// What lane `lane` of this warp shows; between two meetings.
template <class T>
T& shown(int lane) {
  static_assert(sizeof(T) <= sizeof(Thread::slot), "a slot holds it");
  return *reinterpret_cast<T*>(threads[current / 32 * 32 + lane].slot);
}

template <class T>
T exchange(const T& mine, int lane) {
  shown<T>(current % 32) = mine;
  meet(warp());
  const T theirs = shown<T>(lane);
  meet(warp());
  return theirs;
}

inline std::function<void()> kernel;

inline void enter() {
  kernel();
  threads[current].done = true;
  ++progress;
  swapcontext(&threads[current].context, &scheduler);
}

// Every thread of block `which` goes on until it waits; how many are not done yet.
inline int run_threads(int which, int order) {
  int left = 0;
  for (int i = 0; i < block_threads; ++i) {
    const int thread = order % 2 ? block_threads - 1 - i : i;
    current = which * block_threads + thread;
    if (threads[current].done) continue;
    ++left;
    threadIdx.x = thread;
    swapcontext(&scheduler, &threads[current].context);
    if (!error.empty()) break;
  }
  return left;
}

// Runs one cluster; `order` permutes threads and landings so that races show.
inline void run_cluster(const std::vector<Index>& indices, int count, int smem_bytes, int order) {
  const int size = indices.size(), total = size * count;
  block_threads = count;
  threads.clear();
  threads.resize(total);
  warps.assign(total / 32, Meeting{32, 0, 0});
  cluster = Meeting{total, 0, 0};
  barriers.clear();
  transfers.clear();
  blocks.assign(size, Block{});
  for (int i = 0; i < size; ++i) {
    blocks[i].index = indices[i];
    blocks[i].memory.assign(smem_bytes, 0xff);  // NaN wherever nobody wrote
    blocks[i].all = Meeting{count, 0, 0};
  }
  for (Thread& thread : threads) {
    thread.stack = std::make_unique<char[]>(STACK);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, reinterpret_cast<void (*)()>(enter), 0);
  }
  for (int left = total; left > 0;) {
    left = 0;
    const long before = progress;
    for (int i = 0; i < size; ++i) {
      Block& block = blocks[order / 2 % 2 ? size - 1 - i : i];
      blockIdx = block.index;
      std::memcpy(gtco::smem, block.memory.data(), smem_bytes);
      left += run_threads(&block - blocks.data(), order);
      std::memcpy(block.memory.data(), gtco::smem, smem_bytes);
    }
    if (!error.empty()) return;
    if (left == 0 || progress != before) continue;
    current = -count;  // nobody's turn: every block's memory is kept aside
    if (transfers.empty()) return fail(std::to_string(left) + " threads wait for ever");
    const auto next = order % 2 ? transfers.end() - 1 : transfers.begin();
    const std::function<void()> land = *next;
    transfers.erase(next);
    land();
    if (!error.empty()) return;
  }
  current = -count;
  if (!transfers.empty()) fail("a bulk copy that nobody waited for");
}

}  // namespace host

inline void __syncthreads() { host::meet(host::blocks[host::rank()].all); }
inline void __syncwarp() { host::meet(host::warp()); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int offset) {
  return host::exchange(x, (host::current % 32) ^ offset);
}

template <class To, class From>
To bit_cast_to(From x) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To r;
  std::memcpy(&r, &x, sizeof r);
  return r;
}
inline float __int_as_float(unsigned x) { return bit_cast_to<float>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast_to<float>(x); }
inline unsigned __float_as_uint(float x) { return bit_cast_to<unsigned>(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __expf(float x) { return std::exp(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
