// The machine that runs kernels on a CPU, one cluster of blocks after another. The threads of a
// cluster are fibers that switch only where they wait for one another; copies by the copy engine
// land when nobody else can go on, as late as the waits allow. A kernel that breaks a rule, or
// waits for ever, stops with a sentence that names block, thread and line.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "instructions.h"
#include "shadow.h"

namespace host {

constexpr unsigned RANK_SHIFT = 20;  // a shared address: the block's rank, then the offset
constexpr u32 OFFSET = (1u << RANK_SHIFT) - 1;
constexpr std::size_t SMEM_BYTES = 256 * 1024;
constexpr std::size_t STACK_BYTES = 256 * 1024;  // of a thread
constexpr std::size_t MAX_THREADS = 16 * 1024;
constexpr int BLOCK_BARRIERS = 64;  // mbarriers of one block

// Where threads wait for one another again and again, and see what the others did before.
struct Meeting {
  int size = 0, arrived = 0;
  long round = 0;
  int line = 0;  // of the first to arrive
  Clocks arriving, complete;
};

// The lanes of a warp, each at the same instruction.
struct Warp {
  Meeting sync;
  int arrived = 0;
  long round = 0;
};

// An mbarrier: a phase ends when its arrivals and its bytes are complete.
struct Barrier {
  int count = 0, pending = 0;
  long bytes = 0;
  long phase = 0;
  Event made;
  u32 agent = 0, landed = 0;  // of the copies whose bytes it counts
  Clocks arriving, complete;
};

struct Copy {
  u32 to;
  const void* from;  // null for zeros
  int bytes;
};

struct Product {
  void* d;  // floats; of S8, integers
  int n;
  u64 a, b;      // descriptors
  bool by_rows;  // B lies as [K, N]
  bool accumulate;
  Type type;
  const u32* registers;  // A, if it is no tile: `rows` are the thread's two
  float rows[2][32];
};

struct Transfer {
  u32 to, barrier;
  TensorMap map;
  Place place;
  u32 from, bytes;  // of a copy between blocks of the cluster; else 0
  int thread;
  const void* pc;
  std::vector<unsigned char> values;  // that a thread stores; it is done with them
  u32 clock = 0;                      // of that thread
};

// Bytes of memory, by where each range begins.
class Ranges {
 public:
  void clear() { ends_.clear(); }
  void add(const void* from, std::size_t bytes);
  bool meet(const void* from, std::size_t bytes) const;

 private:
  std::map<const char*, const char*> ends_;
};

struct Thread {
  ucontext_t first;
  jmp_buf context;
  bool started = false, done = false, waited = false;
  const void* pc = nullptr;         // of the machine's function it called last
  std::vector<const void*> calls;   // the calls it is in
  const char* waits_for = nullptr;  // while it waits
  const long* moment = nullptr;     // for this to be another than `before`
  long before = 0;
  const char* instruction;  // that its warp executes together, with its operands
  void* operands;
  std::vector<std::vector<Copy>> groups;  // committed copies, oldest first
  std::vector<Copy> open;
  std::vector<std::vector<Product>> products;  // committed wgmma groups
  std::vector<Product> open_products;
  u32 product_groups = 0;  // committed so far
  bool fenced = false;     // wgmma.fence was executed
  Ranges touched;          // of its stack, where registers lie, since the last one
  long cluster_round = 0;
  Clocks clocks;
};

struct Block {
  Index index;
  int left;  // threads that have not ended
  std::vector<unsigned char> memory;
  Shadow shadow;
  Meeting all;
  std::map<u32, Event> visits;  // of other blocks' agents to its memory, the latest of each
  Clocks end;                   // what is done when its last thread ends
};

extern std::vector<Thread> threads;  // of all blocks of the cluster
extern std::vector<Warp> warps;
extern std::vector<Block> blocks;
extern Meeting cluster;
extern std::map<u32, Barrier> barriers;
extern std::vector<Transfer> transfers;  // of the copy engine, under way
extern std::mt19937 chance;
extern int current;   // thread, -1 for none
extern int resident;  // the block whose shared memory is in smem
extern int block_threads;
extern long progress, cluster_number;
extern int smem_bytes;
extern char* stacks;       // of all threads
extern std::string error;  // of the kernel, "" while it is right

// Agents: threads, then the products of each warp, the copies of each mbarrier, the grid before.
inline u32 product_agent(int thread) { return threads.size() + thread / 32; }
inline u32 copy_agent(int block, int slot) {
  return threads.size() + warps.size() + block * BLOCK_BARRIERS + slot;
}
inline u32 grid_agent() { return copy_agent(blocks.size(), 0); }
inline int agent_count() { return grid_agent() + 1; }

inline Thread& self() { return threads[current]; }
inline int rank() { return current / block_threads; }

// Stands at the top of each instruction: where the kernel is.
#define HERE self().pc = __builtin_return_address(0)

void yield(const char* waits_for);
// The others run while `moment` is `before`; until then this thread is not resumed to look.
void wait_while(const long& moment, long before, const char* waits_for);
void fail(const std::string& what);                                 // by the thread that runs
void fail_of(int thread, const void* pc, const std::string& what);  // and goes on
std::string place(const void* pc);  // "<pc ...>", which the runner replaces
std::string describe(const Event& event);

// What thread `thread` does now.
Event event_of(int thread, const void* pc);
void tick(int thread);  // what follows is not part of what was published
void arrive(Meeting& meeting, bool release);
void wait(Meeting& meeting, long round, const char* what);
void meet(Meeting& meeting, const char* what);
// Every lane's operands to the lane that arrives last, which calls `run`.
void execute_together(const char* instruction, void* operands, void (*run)(int first_thread));

// A tensor as the runner gives it.
struct TensorGiven {
  const char* name;
  void* data;
  std::size_t bytes;
  int constant, output;
};

// Address space, null if there is none.
char* reserve(std::size_t bytes, int protection);
// Copies the tensors to where each is far from every other; null, or what is wrong.
const char* map_memory(void* entry, const TensorGiven* given, int count);
char* tensor_base(int index);
void unmap_memory(const TensorGiven* given);  // and copies outputs back
bool in_kernel(const void* pc);               // in its code or its constants
std::string number(long x);

// The byte at a shared address of any block of the cluster.
unsigned char* shared(u32 address, int bytes);
// An access to shared memory by `thread` on behalf of `who`.
void check_shared(u32 address, int bytes, const Access& access, int thread);
void touch_registers(const void* p, int bytes, const void* pc);
// An access to a tensor by the running thread; false if it may not be.
bool check_global(const void* p, int bytes, bool write, const void* pc);
// Fails if the running thread's last store put another value where it had put one.
void check_again();

// The swizzle of so many bytes (32, 64 or 128): the 16-byte chunk of an address moves, among those
// of as many bytes, by the row of 128 bytes it is in.
inline u32 swizzled(u32 address, u32 bytes = 128) {
  return address ^ ((address >> 7 & (bytes / 16 - 1)) << 4);
}

void land(const Transfer& transfer);
void leave();  // the running thread ends

}  // namespace host
