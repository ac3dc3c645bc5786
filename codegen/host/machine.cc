#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <numeric>

Index threadIdx, blockIdx, gridDim;

namespace host {

std::vector<Thread> threads;
std::vector<Warp> warps;
std::vector<Block> blocks;
Meeting cluster;
std::map<u32, Barrier> barriers;
std::vector<Transfer> transfers;
std::mt19937 chance;
int current = -1, block_threads, resident;
long progress, cluster_number;
char* stacks;
int smem_bytes;
std::string error;

namespace {

jmp_buf scheduler;
void (*kernel)(void**);
void** kernel_arguments;

void enter() {
  kernel(kernel_arguments);
  leave();
  yield(nullptr);
}

void resume(int thread) {
  current = thread;
  Thread& next = threads[thread];
  if (_setjmp(scheduler) != 0) return;
  if (next.started) _longjmp(next.context, 1);
  next.started = true;
  getcontext(&next.first);
  next.first.uc_stack.ss_sp = stacks + thread * STACK_BYTES;
  next.first.uc_stack.ss_size = STACK_BYTES;
  next.first.uc_link = nullptr;
  makecontext(&next.first, enter, 0);
  setcontext(&next.first);
}

std::string thread_name(int thread) {
  const Index& at = blocks[thread / block_threads].index;
  return "block (" + number(at.x) + ", " + number(at.y) + ", " + number(at.z) + "), thread " +
         number(thread % block_threads);
}

// Puts block `which` where a kernel looks: its index, its shared memory.
void show_block(int which) {
  blockIdx = blocks[which].index;
  if (resident == which) return;
  std::memcpy(blocks[resident].memory.data(), gtco::smem, smem_bytes);
  std::memcpy(gtco::smem, blocks[which].memory.data(), smem_bytes);
  resident = which;
}

bool still_waits(const Thread& thread) { return thread.moment && *thread.moment == thread.before; }

// How many threads of block `which` are not done; each goes on until it waits.
int run_threads(int which) {
  std::vector<int> order(block_threads);
  std::iota(order.begin(), order.end(), which * block_threads);
  std::shuffle(order.begin(), order.end(), chance);
  int left = 0;
  for (int thread : order) {
    if (threads[thread].done) continue;
    ++left;
    if (still_waits(threads[thread])) continue;
    show_block(which);
    threadIdx.x = thread % block_threads;
    resume(thread);
    if (!error.empty()) break;
  }
  return left;
}

void waits_for_ever() {
  for (int i = 0; i < static_cast<int>(threads.size()); ++i) {
    if (threads[i].done) continue;
    const Block& block = blocks[i / block_threads];
    std::string more;
    if (block.left < block_threads)
      more = "; " + number(block_threads - block.left) + " threads of its block have ended";
    for (const auto& [address, barrier] : barriers)
      if (barrier.bytes != 0)
        more += "; the mbarrier at byte " + number(address & OFFSET) + " lacks " +
                number(barrier.bytes) + " bytes";
    return fail_of(i, threads[i].pc,
                   "waits for ever for " + std::string(threads[i].waits_for) + more);
  }
}

void start_cluster(const std::vector<Index>& indices) {
  const int size = indices.size(), total = size * block_threads;
  ++cluster_number;
  threads.clear();
  threads.resize(total);
  warps.clear();
  warps.resize(total / 32);
  barriers.clear();
  transfers.clear();
  blocks.clear();
  blocks.resize(size);
  const int agents = agent_count();
  const auto prepare = [&](Meeting& meeting, int count) {
    meeting.size = count;
    meeting.arriving.reset(agents);
    meeting.complete.reset(agents);
  };
  cluster = Meeting{};
  prepare(cluster, total);
  for (Warp& warp : warps) prepare(warp.sync, 32);
  for (int i = 0; i < size; ++i) {
    Block& block = blocks[i];
    block.index = indices[i];
    block.left = block_threads;
    block.memory.assign(smem_bytes, 0xff);  // NaN wherever nobody wrote
    block.shadow.reset(smem_bytes);
    block.end.reset(agents);
    prepare(block.all, block_threads);
  }
  resident = 0;
  std::memset(gtco::smem, 0xff, smem_bytes);
  for (int i = 0; i < total; ++i) {
    threads[i].pc = reinterpret_cast<const char*>(kernel) + 1;
    threads[i].clocks.reset(agents);
    tick(i);
  }
}

void run_cluster() {
  const int size = blocks.size();
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  for (int left = 1; left > 0;) {
    left = 0;
    const long before = progress;
    std::shuffle(order.begin(), order.end(), chance);
    for (int which : order) left += run_threads(which);
    current = -1;  // nobody's turn
    if (!error.empty()) return;
    if (left == 0 || progress != before) continue;
    if (transfers.empty()) return waits_for_ever();
    const auto next = transfers.begin() + chance() % transfers.size();
    const Transfer transfer = *next;
    transfers.erase(next);
    land(transfer);
    if (!error.empty()) return;
  }
}

}  // namespace

void yield(const char* waits_for) {
  check_again();
  Thread& thread = self();
  thread.waits_for = waits_for;
  if (_setjmp(thread.context) == 0) _longjmp(scheduler, 1);
}

void wait_while(const long& moment, long before, const char* waits_for) {
  if (moment != before) return;
  Thread& thread = self();
  thread.moment = &moment;
  thread.before = before;
  yield(waits_for);
  thread.moment = nullptr;
}

std::string describe(const Event& event) {
  if (event.async) return "a bulk copy started at " + place(event.pc);
  const bool product = event.agent >= threads.size();
  const int thread = product ? (event.agent - threads.size()) * 32 : event.agent;
  const std::string name = event.cluster == cluster_number
                               ? thread_name(thread)
                               : std::string("a block of another cluster");
  return (product ? "wgmma of the warp of " : "") + name + " at " + place(event.pc);
}

// The first broken rule counts.
void fail_of(int thread, const void* pc, const std::string& what) {
  if (!error.empty()) return;
  error = thread_name(thread) + ", " + place(pc);
  const auto& calls = threads[thread].calls;
  for (int i = static_cast<int>(calls.size()) - 1; i > 0; --i)  // the first is not the kernel's
    if (in_kernel(calls[i])) error += " < " + place(calls[i]);
  error += ": " + what;
}

void fail(const std::string& what) {
  fail_of(current, self().pc, what);
  yield("nothing");  // a thread that broke a rule never goes on
}

Event event_of(int thread, const void* pc) {
  return {u32(thread), threads[thread].clocks.seen(thread), cluster_number, pc};
}

void tick(int thread) {
  Clocks& clocks = threads[thread].clocks;
  clocks.learn(thread, clocks.seen(thread) + 1);
}

void arrive(Meeting& meeting, bool release) {
  ++progress;
  if (release) {
    meeting.arriving.join(self().clocks);
  } else {
    meeting.arriving.join_order(self().clocks);
  }
  tick(current);
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    ++meeting.round;
    meeting.complete = meeting.arriving;
    meeting.arriving.reset(agent_count());
  }
}

void wait(Meeting& meeting, long round, const char* what) {
  wait_while(meeting.round, round, what);
  self().clocks.join(meeting.complete);
}

void meet(Meeting& meeting, const char* what) {
  const long round = meeting.round;
  arrive(meeting, true);
  wait(meeting, round, what);
}

void execute_together(const char* instruction, void* operands, void (*run)(int first_thread)) {
  Warp& warp = warps[current / 32];
  const int first = current / 32 * 32;
  self().instruction = instruction;
  self().operands = operands;
  ++progress;
  const long round = warp.round;
  if (++warp.arrived < 32) {
    return wait_while(warp.round, round, instruction);
  }
  warp.arrived = 0;
  ++warp.round;
  for (int i = first; i < first + 32; ++i)
    if (std::strcmp(threads[i].instruction, instruction) != 0)
      fail(std::string("executes ") + instruction + " while another lane of its warp is at " +
           threads[i].instruction);
  run(first);
}

// What the thread leaves behind; the block ends with its last thread.
void leave() {
  check_again();
  Thread& thread = self();
  if (!thread.waited) fail("ends without griddepcontrol.wait");
  thread.done = true;
  ++progress;
  Block& block = blocks[rank()];
  block.end.join_order(thread.clocks);
  if (--block.left > 0) return;
  for (const auto& [agent, visit] : block.visits)
    if (block.end.done(agent) < visit.clock)
      fail("its block ends, and no barrier orders that after the access to its shared memory by " +
           describe(visit));
  for (const Transfer& transfer : transfers)
    if (int(transfer.to >> RANK_SHIFT) == rank())
      fail("its block ends while a bulk copy into it is under way, started at " +
           place(transfer.pc));
}

}  // namespace host

// -- what the runner calls

using namespace host;

struct ArgumentGiven {
  int tensor;
  long long origin;                 // bytes from the tensor's base
  const gtco::ptx::TensorMap* map;  // null for a pointer; its base is an offset
};

// Runs the kernel over its grid; null, or what is wrong.
extern "C" const char* gtco_host_launch(void (*entry)(void**), const TensorGiven* given,
                                        int tensor_count, const ArgumentGiven* arguments,
                                        int argument_count, const int* grid, int block, int size,
                                        int shared_bytes, unsigned seed) {
  error.clear();
  if (stacks == nullptr) stacks = reserve(STACK_BYTES * MAX_THREADS, PROT_READ | PROT_WRITE);
  if (stacks == nullptr) return "the system gives no address space";
  if (static_cast<std::size_t>(size * block) > MAX_THREADS) return "more than 16384 threads";
  if (shared_bytes > static_cast<int>(SMEM_BYTES)) return "more shared memory than there is";
  kernel = entry;
  block_threads = block;
  smem_bytes = shared_bytes;
  cluster_number = 0;
  chance.seed(seed);
  if (const char* wrong = map_memory(reinterpret_cast<void*>(entry), given, tensor_count))
    return wrong;
  std::vector<gtco::ptx::TensorMap> maps(argument_count);
  std::vector<void*> values(argument_count);
  for (int i = 0; i < argument_count; ++i) {
    char* const base = tensor_base(arguments[i].tensor) + arguments[i].origin;
    values[i] = base;
    if (arguments[i].map == nullptr) continue;
    maps[i] = *arguments[i].map;
    maps[i].base += reinterpret_cast<gtco::u64>(base);
    values[i] = &maps[i];
  }
  kernel_arguments = values.data();
  gridDim = {grid[0], grid[1], grid[2]};
  const int x = grid[0], y = grid[1], total = grid[0] * grid[1] * grid[2];
  for (int i = 0; i < total && error.empty(); i += size) {
    std::vector<Index> indices;
    for (int j = i; j < i + size; ++j) indices.push_back({j % x, j / x % y, j / (x * y)});
    start_cluster(indices);
    run_cluster();
  }
  current = -1;
  unmap_memory(given);
  return error.empty() ? nullptr : error.c_str();
}
