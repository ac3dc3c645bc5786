// What is known of each byte of memory: who wrote it last and who has read it since, as points on
// the threads' clocks (FastTrack, Flanagan and Freund 2009).
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <string>
#include <vector>

#include "cuda_host.h"
#include "types.cuh"

namespace host {

using gtco::u32;

// How far a thread has seen every agent (threads, the products of a warp, the copies that an
// mbarrier counts). `done` is the order of execution alone: what lies before it has happened, so
// that what it read may be overwritten. What lies within `seen` may also be read, and within
// `fenced` also by the asynchronous proxy (wgmma and the copy engine).
class Clocks {
 public:
  void reset(int agents) {
    agents_ = agents;
    all_.assign(3 * agents, 0);
  }
  u32& done(u32 agent) { return all_[agent]; }
  u32& seen(u32 agent) { return all_[agents_ + agent]; }
  u32& fenced(u32 agent) { return all_[2 * agents_ + agent]; }
  void join(const Clocks& other) { join(other, 3); }
  void join_order(const Clocks& other) { join(other, 1); }
  void fence() {
    for (int i = 0; i < agents_; ++i) fenced(i) = seen(i);
  }
  // Agent `agent` is seen up to `clock`.
  void learn(u32 agent, u32 clock) {
    learn_order(agent, clock);
    if (seen(agent) < clock) seen(agent) = clock;
  }
  // What it did up to `clock` has happened.
  void learn_order(u32 agent, u32 clock) {
    if (done(agent) < clock) done(agent) = clock;
  }

 private:
  void join(const Clocks& other, int parts) {
    u32* const mine = all_.data();
    const u32* const theirs = other.all_.data();
    for (int i = 0; i < parts * agents_; ++i) mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
  }

  int agents_ = 0;
  std::vector<u32> all_;
};

// Something an agent did; clock 0 is nothing.
struct Event {
  u32 agent = 0, clock = 0;
  long cluster = 0;  // agents of two clusters are never ordered
  const void* pc = nullptr;
  bool async = false;  // by the copy engine
};

enum class Kind { READ, WRITE, ASYNC_READ, ASYNC_WRITE };

// An access as it is checked: what `who` does must come after what `clocks` have seen.
struct Access {
  Kind kind;
  Event who;
  Clocks* clocks;
  bool starts_copy = false;  // the bytes arrive later
  bool unwritten = false;    // bytes that nobody wrote may be read
};

// Why an access must not be, and the other event.
struct Conflict {
  const char* what = nullptr;
  Event other;
};

class Shadow {
 public:
  void reset(std::size_t bytes) {
    cells_.assign((bytes + 3) / 4, Cell{});
    split_.clear();
    readers_.clear();
  }
  // Whether bytes [offset, offset + bytes) may be accessed so; if they may, it is recorded.
  Conflict check(std::size_t offset, int bytes, const Access& access);
  // Of each of the bytes, whether `who` wrote it last.
  std::vector<bool> written_by(std::size_t offset, int bytes, const Event& who);
  // A copy that was started has arrived; it is `who`'s from now on.
  void land(std::size_t offset, int bytes, const Event& who);

 private:
  struct Cell {
    Event write, read;
    int more = -1;   // in readers_: further reads that no order covers
    int bytes = -1;  // in split_: the four bytes differ
    const void* under_way = nullptr;
  };

  template <class F>
  bool each(std::size_t offset, int bytes, F f);
  Conflict check(Cell& cell, const Access& access);

  std::vector<Cell> cells_;
  std::deque<std::array<Cell, 4>> split_;
  std::deque<std::vector<Event>> readers_;
};

}  // namespace host
