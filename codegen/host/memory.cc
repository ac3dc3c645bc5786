// What a kernel's loads and stores may touch.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "machine.h"

namespace gtco {
alignas(1024) unsigned char smem[host::SMEM_BYTES];
}

namespace host {

namespace {

constexpr int MAX_TENSORS = 64;
constexpr unsigned TENSOR_SHIFT = 36;  // further apart than any 32-bit index reaches

// A tensor, far away from every other.
struct Region {
  std::string name;
  char* base;
  std::size_t bytes;
  bool constant, output;
  Shadow shadow;
};

std::vector<Region> regions;
char* tensors;
const char *code_begin, *code_end;  // the kernel's shared object

// A store to bytes of an output of which the thread stored some before, and what they held then.
struct Again {
  const char* at = nullptr;  // null for none
  std::vector<char> before;
  std::vector<bool> own;
  const void* pc;
  std::string name;  // of the output, and the first byte
};
Again again;

int find_code(dl_phdr_info* info, std::size_t, void* inside) {
  const char* base = reinterpret_cast<const char*>(info->dlpi_addr);
  const char *begin = nullptr, *end = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& part = info->dlpi_phdr[i];
    if (part.p_type != PT_LOAD) continue;
    if (!begin) begin = base + part.p_vaddr;
    end = base + part.p_vaddr + part.p_memsz;
  }
  if (inside < begin || inside >= end) return 0;
  code_begin = begin;
  code_end = end;
  return 1;
}

// An access of the kernel's own code, by an ordinary load or store.
void touch(const void* p, int bytes, bool write, const void* pc) {
  if (current < 0) return;
  check_again();
  Thread& thread = self();
  const char* const at = static_cast<const char*>(p);
  const std::size_t offset = at - reinterpret_cast<const char*>(gtco::smem);
  const bool whole = (bytes & (bytes - 1)) == 0 && bytes <= 16;
  const auto misaligned = [&]() {
    if (!whole || reinterpret_cast<std::size_t>(p) % bytes == 0) return false;
    thread.pc = pc;
    fail("an access of " + number(bytes) + " bytes that is not aligned to them");
    return true;
  };
  if (offset < SMEM_BYTES) {
    thread.pc = pc;
    if (misaligned()) return;
    const Kind kind = write ? Kind::WRITE : Kind::READ;
    const u32 address = offset | u32(rank()) << RANK_SHIFT;
    check_shared(address, bytes, {kind, event_of(current, pc), &thread.clocks}, current);
    return;
  }
  if (static_cast<std::size_t>(at - stacks) < STACK_BYTES * MAX_THREADS) {
    touch_registers(p, bytes, pc);
    return;
  }
  if (static_cast<std::size_t>(at - reinterpret_cast<char*>(&threadIdx)) < sizeof threadIdx ||
      static_cast<std::size_t>(at - reinterpret_cast<char*>(&blockIdx)) < sizeof blockIdx ||
      static_cast<std::size_t>(at - reinterpret_cast<char*>(&gridDim)) < sizeof gridDim)
    return;
  if (!write && at >= code_begin && at < code_end) return;
  thread.pc = pc;
  if (!misaligned()) check_global(p, bytes, write, pc);
}

}  // namespace

// An access to what lies on the thread's stack, as its registers do.
void touch_registers(const void* p, int bytes, const void* pc) {
  Thread& thread = self();
  if (thread.fenced) thread.touched.add(p, bytes);
  if (thread.products.empty() && thread.open_products.empty()) return;
  const char* const at = static_cast<const char*>(p);
  const auto overlap = [&](const void* from, std::size_t count) {
    return from < static_cast<const void*>(at + bytes) &&
           p < static_cast<const void*>(static_cast<const char*>(from) + count);
  };
  const auto inside = [&](const Product& product) {
    return overlap(product.d, product.n / 2 * sizeof(float)) ||
           (product.registers && overlap(product.registers, 4 * sizeof(u32)));
  };
  const auto any = [&](const std::vector<Product>& group) {
    return std::any_of(group.begin(), group.end(), inside);
  };
  if (any(thread.open_products) ||
      std::any_of(thread.products.begin(), thread.products.end(), any)) {
    thread.pc = pc;
    fail("touches registers of a product before wgmma.wait_group");
  }
}

// A store is announced before it is done, so its value is known at the thread's next step.
void check_again() {
  if (again.at == nullptr) return;
  const Again store = std::exchange(again, {});
  for (std::size_t i = 0; i < store.before.size(); ++i)
    if (store.own[i] && store.at[i] != store.before[i]) {
      self().pc = store.pc;
      return fail("writes " + store.name + " again, and another value");
    }
}

void Ranges::add(const void* from, std::size_t bytes) {
  const char* begin = static_cast<const char*>(from);
  const char* end = begin + bytes;
  auto next = ends_.upper_bound(begin);
  if (next != ends_.begin() && std::prev(next)->second >= begin) begin = (--next)->first;
  for (; next != ends_.end() && next->first <= end; next = ends_.erase(next))
    end = std::max(end, next->second);
  ends_[begin] = end;
}

bool Ranges::meet(const void* from, std::size_t bytes) const {
  const char* const begin = static_cast<const char*>(from);
  const auto next = ends_.lower_bound(begin + bytes);
  return next != ends_.begin() && std::prev(next)->second > begin;
}

char* reserve(std::size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
}

const void* assume_aligned(const void* p, int bytes) {
  HERE;
  if (reinterpret_cast<std::size_t>(p) % bytes != 0)
    fail("an access of " + number(bytes) + " bytes that is not aligned to them");
  return p;
}

bool in_kernel(const void* pc) { return pc >= code_begin && pc < code_end; }

std::string number(long x) { return std::to_string(x); }

std::string place(const void* pc) {
  char text[32];
  const long offset = static_cast<const char*>(pc) - code_begin - 1;
  std::snprintf(text, sizeof text, "<pc %lx>", offset);
  return text;
}

const char* map_memory(void* entry, const TensorGiven* given, int count) {
  if (tensors == nullptr) tensors = reserve(std::size_t(MAX_TENSORS) << TENSOR_SHIFT, PROT_NONE);
  if (tensors == nullptr) return "the system gives no address space";
  if (count > MAX_TENSORS) return "more tensors than the host build can follow";
  dl_iterate_phdr(find_code, entry);
  const std::size_t middle = std::size_t(1) << (TENSOR_SHIFT - 1);
  for (int i = 0; i < count; ++i) {
    const TensorGiven& from = given[i];
    char* const base = tensors + (std::size_t(i) << TENSOR_SHIFT) + middle;
    mprotect(base, from.bytes, PROT_READ | PROT_WRITE);
    std::memcpy(base, from.data, from.bytes);
    regions.push_back({from.name, base, from.bytes, from.constant != 0, from.output != 0, {}});
    if (from.output) regions.back().shadow.reset(from.bytes);
  }
  return nullptr;
}

char* tensor_base(int index) { return regions[index].base; }

void unmap_memory(const TensorGiven* given) {
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const Region& region = regions[i];
    if (region.output) std::memcpy(given[i].data, region.base, region.bytes);
    mmap(region.base, region.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }
  regions.clear();
}

unsigned char* shared(u32 address, int bytes) {
  const u32 owner = address >> RANK_SHIFT, offset = address & OFFSET;
  if (owner >= blocks.size() || offset + bytes > blocks[owner].memory.size()) return nullptr;
  return (int(owner) == resident ? gtco::smem : blocks[owner].memory.data()) + offset;
}

void check_shared(u32 address, int bytes, const Access& access, int thread) {
  const char* const verb =
      access.kind == Kind::READ || access.kind == Kind::ASYNC_READ ? "reads" : "writes";
  const auto wrong = [&](const std::string& what) {
    fail_of(thread, access.who.pc,
            std::string(verb) + " shared memory at byte " + number(address & OFFSET) + ": " + what);
    if (current >= 0) yield("nothing");
  };
  const int owner = address >> RANK_SHIFT;
  if (shared(address, bytes) == nullptr)
    return wrong("outside the " + number(smem_bytes) + " bytes of a block");
  Block& block = blocks[owner];
  if (owner != thread / block_threads) {
    if (block.left == 0) return wrong("its block has ended");
    block.visits[access.who.agent] = access.who;
  }
  const Conflict conflict = block.shadow.check(address & OFFSET, bytes, access);
  if (conflict.what == nullptr) return;
  const Event& other = conflict.other;
  if (other.pc == nullptr) return wrong(conflict.what);
  wrong(std::string(conflict.what) +
        (other.clock ? " by " + describe(other) : ", started at " + place(other.pc)));
}

bool check_global(const void* p, int bytes, bool write, const void* pc) {
  const char* const at = static_cast<const char*>(p);
  const std::size_t slot = static_cast<std::size_t>(at - tensors) >> TENSOR_SHIFT;
  const auto wrong = [&](const std::string& what) {
    fail(std::string(write ? "writes " : "reads ") + what);
    return false;
  };
  if (slot >= regions.size()) return wrong("outside every tensor");
  Region& region = regions[slot];
  const long offset = at - region.base;
  if (offset < 0 || offset + bytes > static_cast<long>(region.bytes))
    return wrong("byte " + number(offset) + " of %" + region.name + ", which has " +
                 number(region.bytes));
  if (!region.constant && self().clocks.seen(grid_agent()) == 0)
    return wrong("%" + region.name + ", which is no constant, before griddepcontrol.wait");
  if (write && !region.output) return wrong("%" + region.name + ", which is no output");
  if (!region.output) return true;
  const auto name = [&] { return "byte " + number(offset) + " of %" + region.name; };
  const Event who = event_of(current, pc);
  if (write) {
    std::vector<bool> own = region.shadow.written_by(offset, bytes, who);
    if (std::find(own.begin(), own.end(), true) != own.end())
      again = {at, {at, at + bytes}, std::move(own), pc, name()};
  }
  const Conflict conflict =
      region.shadow.check(offset, bytes, {write ? Kind::WRITE : Kind::READ, who, &self().clocks});
  if (conflict.what == nullptr) return true;
  return wrong(name() + ": " + conflict.what +
               (conflict.other.pc ? " by " + describe(conflict.other) : ""));
}

}  // namespace host

using namespace host;

// -- in place of the thread sanitizer's library ----------------------------------------------

#define AT __builtin_return_address(0)
#define TOUCH(bytes)                                                                    \
  extern "C" void __tsan_read##bytes(void* p) { touch(p, bytes, false, AT); }           \
  extern "C" void __tsan_write##bytes(void* p) { touch(p, bytes, true, AT); }           \
  extern "C" void __tsan_unaligned_read##bytes(void* p) { touch(p, bytes, false, AT); } \
  extern "C" void __tsan_unaligned_write##bytes(void* p) { touch(p, bytes, true, AT); }
TOUCH(1);
TOUCH(2);
TOUCH(4);
TOUCH(8);
TOUCH(16);

extern "C" void __tsan_read_range(void* p, unsigned long bytes) { touch(p, bytes, false, AT); }
extern "C" void __tsan_write_range(void* p, unsigned long bytes) { touch(p, bytes, true, AT); }
extern "C" void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  touch(from, bytes, false, AT);
  touch(to, bytes, true, AT);
  return std::memcpy(to, from, bytes);
}
extern "C" void* __tsan_memset(void* to, int value, unsigned long bytes) {
  touch(to, bytes, true, AT);
  return std::memset(to, value, bytes);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void* caller) {
  if (current >= 0) self().calls.push_back(caller);
}
extern "C" void __tsan_func_exit() {
  if (current < 0 || self().calls.empty()) return;
  self().calls.pop_back();
  self().pc = AT;
}
