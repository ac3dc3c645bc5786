// Barriers, asynchronous copies, and what orders them.
#include <cstring>

#include "machine.h"

namespace host {

namespace {

Barrier& find(u32 address) {
  const auto found = barriers.find(address);
  if (found == barriers.end()) {
    fail("uses an mbarrier that nobody initialised");
  } else if (self().clocks.done(found->second.made.agent) < found->second.made.clock) {
    fail("uses an mbarrier, and no barrier orders that after its mbarrier.init by " +
         describe(found->second.made));
  }
  const u32 owner = address >> RANK_SHIFT;
  if (int(owner) != rank()) {
    if (blocks[owner].left == 0) fail("uses an mbarrier of a block that has ended");
    const Event event = event_of(current, self().pc);
    blocks[owner].visits[event.agent] = event;
  }
  return found->second;
}

void settle(Barrier& barrier) {
  ++progress;
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
  barrier.complete.join(barrier.arriving);
}

}  // namespace

// -- barriers

void sync_threads(int line) {
  HERE;
  Meeting& all = blocks[rank()].all;
  if (all.arrived % all.size == 0) all.line = line;
  if (all.line != line)
    fail("is at the barrier of line " + std::to_string(line) +
         " while other threads are at that of line " + std::to_string(all.line));
  meet(all, "the other threads at a block barrier");
}

void sync_warp() {
  HERE;
  meet(warps[current / 32].sync, "the other lanes at a warp barrier");
}

void cluster_arrive(bool release) {
  HERE;
  self().cluster_round = cluster.round;
  arrive(cluster, release);
}

void cluster_wait() {
  HERE;
  wait(cluster, self().cluster_round, "the other threads at a cluster barrier");
}

void griddepcontrol_wait() {
  self().waited = true;
  self().clocks.learn(grid_agent(), 1);
}

void fence_proxy_async() {
  self().clocks.fence();
  tick(current);
}

void mbarrier_init(u32 address, u32 arrivals) {
  HERE;
  int slot = 0;
  for (const auto& [other, barrier] : barriers)
    slot += other != address && other >> RANK_SHIFT == address >> RANK_SHIFT;
  if (shared(address, 8) == nullptr || address % 8 != 0) fail("no place for an mbarrier");
  if (slot >= BLOCK_BARRIERS) fail("more mbarriers than the host build can follow");
  Barrier barrier;
  barrier.count = barrier.pending = arrivals;
  barrier.made = event_of(current, self().pc);
  barrier.agent = copy_agent(rank(), slot);
  barrier.arriving.reset(agent_count());
  barrier.complete.reset(agent_count());
  barriers[address] = barrier;
}

void mbarrier_arrive(u32 address, bool release) {
  HERE;
  Barrier& barrier = find(address);
  if (barrier.pending == 0) fail("is one arrival more than the mbarrier expects");
  if (release) {
    barrier.arriving.join(self().clocks);
  } else {
    barrier.arriving.join_order(self().clocks);
  }
  tick(current);
  --barrier.pending;
  settle(barrier);
}

void mbarrier_arrive_expect_tx(u32 address, u32 bytes) {
  HERE;
  Barrier& barrier = find(address);
  if (barrier.pending == 0) fail("is one arrival more than the mbarrier expects");
  barrier.bytes += bytes;
  barrier.arriving.join(self().clocks);
  tick(current);
  --barrier.pending;
  settle(barrier);
}

void mbarrier_wait(u32 address, u32 parity) {
  HERE;
  if (int(address >> RANK_SHIFT) != rank()) fail("waits for an mbarrier of another block");
  Barrier& barrier = find(address);
  wait_while(barrier.phase, parity, "a phase of an mbarrier");
  self().clocks.join(barrier.complete);
}

// -- loads

void ld_global(void* to, const void* from, int bytes) {
  HERE;
  if (reinterpret_cast<u64>(from) % bytes != 0) fail("ld.global from an address not aligned");
  check_global(from, bytes, false, self().pc);
  std::memcpy(to, from, bytes);
}

// -- cp.async

void cp_async(u32 to, const void* from, int bytes, bool valid) {
  HERE;
  Thread& thread = self();
  if (to % bytes != 0 || reinterpret_cast<u64>(from) % bytes != 0)
    fail("cp.async between addresses that are not aligned");
  if (valid) check_global(from, bytes, false, thread.pc);
  check_shared(to, bytes, {Kind::WRITE, event_of(current, thread.pc), &thread.clocks, true},
               current);
  thread.open.push_back({to, valid ? from : nullptr, bytes});
}

void cp_async_commit() {
  Thread& thread = self();
  thread.groups.push_back(std::move(thread.open));
  thread.open.clear();
}

void cp_async_wait(int pending) {
  HERE;
  auto& groups = self().groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const Copy& copy : groups.front()) {
      unsigned char* const to = shared(copy.to, copy.bytes);
      if (copy.from) {
        std::memcpy(to, copy.from, copy.bytes);
      } else {
        std::memset(to, 0, copy.bytes);
      }
      blocks[rank()].shadow.land(copy.to & OFFSET, copy.bytes, event_of(current, self().pc));
    }
    groups.erase(groups.begin());
  }
}

// -- the copy engine

namespace {

// What the copy engine makes of a float32: the nearest tf32, ties to even (recorded on an H200).
void round_to_tf32(unsigned char* element) {
  u32 bits;
  std::memcpy(&bits, element, 4);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  bits = is_nan ? 0x7fffe000 : (bits + 0xfff + (bits >> 13 & 1)) & 0xffffe000;
  std::memcpy(element, &bits, 4);
}

int rows_of_box(const TensorMap& map) { return map.box[1] * map.box[2] * map.box[3] * map.box[4]; }

// Elements of row `row` of a box that lie in the tensor, and where they do in memory.
struct RowOfBox {
  gtco::i64 count;
  u64 from;
};

RowOfBox row_of_window(const TensorMap& map, const Place& place, int row) {
  const int axes = map.dimensions - 2;
  gtco::i64 all = place.at[1 + axes];  // windows ahead of the first one
  gtco::i64 count[3];                  // of an image, along its width, height and frames
  for (int i = axes - 1; i >= 0; --i) {
    const int from = place.at[1 + i] - map.lower[i];
    count[i] = (map.sizes[1 + i] + map.upper[i] - map.lower[i] - 1) / map.stride[i] + 1;
    if (from % map.stride[i] != 0 || from < 0 || from / map.stride[i] >= count[i])
      fail("a copy of windows begins between them, or outside");
    all = all * count[i] + from / map.stride[i];
  }
  all += row;
  const gtco::i64 left = map.sizes[0] - place.at[0];
  bool inside = left > 0;
  u64 from = map.base + place.at[0] * gtco::i64(map.element_bytes);
  for (int i = 0; i <= axes; ++i) {
    gtco::i64 at = all;
    if (i < axes) {
      at = map.lower[i] + all % count[i] * map.stride[i] + place.tap[i];
      all /= count[i];
    }
    inside = inside && at >= 0 && at < map.sizes[1 + i];
    from += at * map.strides[i];
  }
  return {inside ? (left < map.box[0] ? left : map.box[0]) : 0, from};
}

RowOfBox row_of_box(const TensorMap& map, const Place& place, int row) {
  if (map.windows) return row_of_window(map, place, row);
  const gtco::i64 x = place.at[0];
  bool inside = x >= 0 && x < map.sizes[0];
  u64 from = map.base + x * map.element_bytes;
  for (int dimension = 1; dimension < 5; ++dimension) {
    const int at = place.at[dimension] + row % map.box[dimension];
    row /= map.box[dimension];
    inside = inside && at >= 0 && at < map.sizes[dimension];
    from += at * map.strides[dimension - 1];
  }
  const gtco::i64 left = map.sizes[0] - x;
  return {inside ? (left < map.box[0] ? left : map.box[0]) : 0, from};
}

}  // namespace

void bulk_copy(u32 to, const TensorMap& map, int dimensions, const Place& place, u32 barrier,
               u32 targets) {
  HERE;
  Thread& thread = self();
  if (dimensions != map.dimensions)
    fail("a copy of " + number(dimensions) + " dimensions by a tensor map of " +
         number(map.dimensions));
  const int row_bytes = map.box[0] * map.element_bytes;
  const int swizzle = map.swizzle_bytes;
  if (swizzle != 0 && (to % (8 * swizzle) != 0 || row_bytes != swizzle))
    fail("a swizzled tile is not made of rows of " + number(swizzle) + " bytes at a multiple of " +
         number(8 * swizzle));
  find(barrier);
  for (int row = 0; row < rows_of_box(map); ++row) {
    const RowOfBox read = row_of_box(map, place, row);
    if (read.count > 0)
      check_global(reinterpret_cast<const void*>(read.from), read.count * map.element_bytes, false,
                   thread.pc);
  }
  for (u32 block = 0; block < blocks.size(); ++block) {
    if ((targets >> block & 1) == 0) continue;
    const u32 there = mapa(to, block);
    const Event event = event_of(current, thread.pc);
    check_shared(there, row_bytes * rows_of_box(map),
                 {Kind::ASYNC_WRITE, event, &thread.clocks, true}, current);
    transfers.push_back(
        {there, mapa(barrier, block), map, place, 0, 0, current, thread.pc, {}, event.clock});
  }
  ++progress;
}

// To a cache that nothing here has: what it names must be there.
void bulk_prefetch(const void* from, u32 bytes) {
  HERE;
  if (reinterpret_cast<u64>(from) % 16 != 0 || bytes % 16 != 0)
    fail("a prefetch from an address or of a size that is no multiple of 16");
  check_global(from, bytes, false, self().pc);
}

void bulk_copy_to_cluster(u32 to, u32 from, u32 bytes, u32 barrier) {
  HERE;
  Thread& thread = self();
  if (to % 16 != 0 || from % 16 != 0 || bytes % 16 != 0)
    fail("a bulk copy between addresses or of a size that is no multiple of 16");
  find(barrier);
  const Event event = event_of(current, thread.pc);
  // What nobody wrote may travel along: the padding of a tile.
  check_shared(from, bytes, {Kind::ASYNC_READ, event, &thread.clocks, false, true}, current);
  check_shared(to, bytes, {Kind::ASYNC_WRITE, event, &thread.clocks, true}, current);
  transfers.push_back({to, barrier, {}, {}, from, bytes, current, thread.pc});
  ++progress;
}

// Unlike a copy it reads registers: the sender may end before it lands.
void st_async(u32 to, const void* values, int bytes, u32 barrier) {
  HERE;
  Thread& thread = self();
  if (to % bytes != 0) fail("st.async to an address that is not aligned");
  if (to >> RANK_SHIFT != barrier >> RANK_SHIFT)
    fail("st.async to one block and an mbarrier of another");
  find(barrier);
  const Event event = event_of(current, thread.pc);
  check_shared(to, bytes, {Kind::ASYNC_WRITE, event, &thread.clocks, true}, current);
  const auto* const first = static_cast<const unsigned char*>(values);
  transfers.push_back(
      {to, barrier, {}, {}, 0, 0, current, thread.pc, {first, first + bytes}, event.clock});
  ++progress;
}

void land(const Transfer& transfer) {
  const TensorMap& map = transfer.map;
  const bool sent = transfer.bytes > 0;  // from shared memory
  if (sent && blocks[transfer.from >> RANK_SHIFT].left == 0)
    return fail_of(transfer.thread, transfer.pc, "its block ended before what it sent had left");
  const auto found = barriers.find(transfer.barrier);
  if (found == barriers.end())
    return fail_of(transfer.thread, transfer.pc,
                   "a bulk copy counts on an mbarrier that nobody initialised");
  Barrier& barrier = found->second;
  const int row_bytes = map.box[0] * map.element_bytes;
  const bool stored = !transfer.values.empty();
  const int bytes = stored ? transfer.values.size()
                    : sent ? transfer.bytes
                           : row_bytes * rows_of_box(map);
  const Event event{barrier.agent, ++barrier.landed, cluster_number, transfer.pc, true};
  const int owner = transfer.to >> RANK_SHIFT;
  if (sent) std::memcpy(shared(transfer.to, bytes), shared(transfer.from, bytes), bytes);
  if (stored) {
    std::memcpy(shared(transfer.to, bytes), transfer.values.data(), bytes);
    barrier.arriving.learn(transfer.thread, transfer.clock);  // what has landed was sent
  } else {
    barrier.arriving.learn_order(transfer.thread, transfer.clock);  // and asked for
  }
  for (int row = 0; !sent && !stored && row < rows_of_box(map); ++row) {
    const RowOfBox read = row_of_box(map, transfer.place, row);
    for (int column = 0; column < map.box[0]; ++column) {
      const u32 at = transfer.to + row * row_bytes + column * map.element_bytes;
      unsigned char* const to =
          shared(map.swizzle_bytes != 0 ? swizzled(at, map.swizzle_bytes) : at, map.element_bytes);
      if (column < read.count) {
        const u64 from = read.from + column * gtco::i64(map.element_bytes);
        std::memcpy(to, reinterpret_cast<const void*>(from), map.element_bytes);
        if (map.rounds) round_to_tf32(to);
      } else {
        std::memset(to, 0, map.element_bytes);
      }
    }
  }
  blocks[owner].shadow.land(transfer.to & OFFSET, bytes, event);
  if (owner != transfer.thread / block_threads) blocks[owner].visits[event.agent] = event;
  barrier.bytes -= bytes;
  barrier.arriving.learn(event.agent, event.clock);
  settle(barrier);
}

// -- addresses

u32 shared_address(const void* p) {
  const auto* const at = static_cast<const unsigned char*>(p);
  return static_cast<u32>(at - gtco::smem) | u32(rank()) << RANK_SHIFT;
}

u32 block_rank() { return rank(); }

u32 mapa(u32 address, u32 rank) { return (address & OFFSET) | rank << RANK_SHIFT; }

}  // namespace host
