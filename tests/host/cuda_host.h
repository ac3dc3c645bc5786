// Just enough of CUDA C++ for a kernel to run on a CPU, one block after another. The threads of a
// block are fibers that switch only where they wait for one another; a barrier that not all reach
// ends the program.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __shared__
#define __restrict__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n)

struct Index {
  int x, y, z;
};
inline Index threadIdx, blockIdx;

namespace host {

constexpr std::size_t STACK = 256 * 1024;

// A meeting of `size` threads that wait for one another again and again.
struct Meeting {
  int size = 0, arrived = 0;
  long round = 0;
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
};

inline std::vector<Thread> threads;
inline std::vector<Meeting> warps;
inline Meeting block;
inline ucontext_t scheduler;
inline int current;
inline long progress;

inline void yield() {
  const int me = current;
  swapcontext(&threads[me].context, &scheduler);
  current = me;
  threadIdx.x = me;
}

inline void meet(Meeting& meeting) {
  const long round = meeting.round;
  ++progress;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    ++meeting.round;
  }
  while (meeting.round == round) yield();
}

inline Meeting& warp() { return warps[current / 32]; }

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

// Runs one block; `order` permutes the threads so that races show.
inline void run_block(int count, int order) {
  threads.clear();
  threads.resize(count);
  warps.assign(count / 32, Meeting{32, 0, 0});
  block = Meeting{count, 0, 0};
  for (Thread& thread : threads) {
    thread.stack = std::make_unique<char[]>(STACK);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, reinterpret_cast<void (*)()>(enter), 0);
  }
  for (int left = count; left > 0;) {
    left = 0;
    const long before = progress;
    for (int i = 0; i < count; ++i) {
      current = order % 2 ? count - 1 - i : i;
      if (threads[current].done) continue;
      ++left;
      threadIdx.x = current;
      swapcontext(&scheduler, &threads[current].context);
    }
    if (left > 0 && progress == before) {
      std::fprintf(stderr, "deadlock: %d threads wait for ever\n", left);
      std::abort();
    }
  }
}

}  // namespace host

inline void __syncthreads() { host::meet(host::block); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int offset) {
  return host::exchange(x, host::current % 32 ^ offset);
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
