// What the lanes of a warp do together: shuffles, ldmatrix, mma.sync, wgmma.
#include <cmath>
#include <cstring>

#include "machine.h"

namespace host {

// NaN is what would be 480; there is no infinity.
float e4m3(unsigned char bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  float size = exponent > 0 ? std::ldexp(8.0f + fraction, exponent - 10) : fraction / 512.0f;
  if (exponent == 15 && fraction == 7) size = NAN;
  return bits >> 7 ? -size : size;
}

namespace {

// What a tensor core keeps of a sum of tf32 products: it cuts (Ootomo and Yokota 2022).
float cut_sum(double sum) {
  const float nearest = static_cast<float>(sum);
  const bool beyond = std::isfinite(nearest) && std::fabs(double(nearest)) > std::fabs(sum);
  return beyond ? std::nextafter(nearest, 0.0f) : nearest;
}

// How many elements a register has.
int in_register(Type type) {
  return type == Type::TF32 ? 1 : type == Type::E4M3 || type == Type::S8 ? 4 : 2;
}

// The elements of a register as the tensor core reads them; how many. Of tf32 the low 13 bits are
// not looked at.
int elements(float* values, u32 bits, Type type) {
  if (type == Type::TF32) {
    values[0] = bit_cast_to<float>(bits & 0xffffe000);
    return 1;
  }
  const int count = in_register(type);
  for (int i = 0; i < count; ++i) {
    if (type == Type::E4M3) values[i] = e4m3(bits >> 8 * i);
    if (type == Type::S8) values[i] = static_cast<signed char>(bits >> 8 * i);
    if (type == Type::BF16) values[i] = bit_cast_to<float>(bits >> 16 * i << 16);
    if (type == Type::F16)
      values[i] = static_cast<float>(bit_cast_to<_Float16>(static_cast<gtco::u16>(bits >> 16 * i)));
  }
  return count;
}

// `sum` and the products of so many elements, one after the other.
template <class T>
T add_up(T sum, const float* left, const float* right, int count) {
  for (int k = 0; k < count; ++k) sum += left[k] * right[k];
  return sum;
}

template <class T>
T& operand(int thread) {
  return *static_cast<T*>(threads[thread].operands);
}

struct Shuffle {
  const void* mine;
  void* theirs;
  int bytes, offset;
};

struct Matrices {
  u32* r;
  u32 address;
  bool trans;
};

struct Multiply {
  void* d;  // floats; of S8, integers
  const u32* a;
  u32 b[2];
  Type type;
};

struct Fragment {  // of A
  const u32* a;
  float (*rows)[32];  // to be filled in: lane / 4 and lane / 4 + 8
  Type type;
};

// Where 16 of the 32 bytes of row `row` lie of the wgmma tile that a descriptor says.
u32 place_in(u64 tile, int row, int byte) {
  const u32 row_bytes = tile >> 32;
  return swizzled(u32(tile) + row * row_bytes + byte, row_bytes);
}

// The 32 bytes of row `row` of a wgmma tile, as floats; how many.
int row_of(float (&values)[32], u64 tile, int row, Type type) {
  int count = 0;
  for (int byte = 0; byte < 32; byte += 16) {
    u32 bits[4];
    std::memcpy(bits, shared(place_in(tile, row, byte), 16), 16);
    for (u32 each : bits) count += elements(values + count, each, type);
  }
  return count;
}

// Where column `column` of row `k` lies of a wgmma tile of 16 bits with rows of 128 bytes for each
// of the 16 along K, of 64 columns each.
u32 place_in_rows(u64 tile, int k, int column) {
  const u32 leading = tile >> 48;
  return swizzled(u32(tile) + column / 64 * leading * 16 + k * 128 + column % 64 * 2);
}

// That column of such a tile.
int column_of(float (&values)[32], u64 tile, int column, Type type) {
  for (int k = 0; k < 16; ++k) {
    gtco::u16 bits;
    std::memcpy(&bits, shared(place_in_rows(tile, k, column), 2), 2);
    elements(values + k, bits, type);
  }
  return 16;
}

// Register 4 j + i of a thread: row (warp % 4) 16 + lane / 4 + i / 2 * 8, column j 8 + lane % 4 * 2
// + i % 2.
void multiply(const Product& product) {
  const int thread = current % block_threads;
  const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
  float left[2][32], right[32];
  if (product.registers) {
    std::memcpy(left, product.rows, sizeof left);
  } else {
    row_of(left[0], product.a, row, product.type);
    row_of(left[1], product.a, row + 8, product.type);
  }
  const auto right_of = product.by_rows ? column_of : row_of;
  for (int j = 0; j < product.n / 8; ++j)
    for (int i = 0; i < 2; ++i) {
      const int count = right_of(right, product.b, j * 8 + thread % 4 * 2 + i, product.type);
      for (int half = 0; half < 2; ++half) {
        const int at = 4 * j + 2 * half + i;
        if (product.type == Type::S8) {
          int& to = static_cast<int*>(product.d)[at];
          to = add_up(product.accumulate ? to : 0, left[half], right, count);
        } else {
          float& to = static_cast<float*>(product.d)[at];
          to = add_up(product.accumulate ? to : 0.0f, left[half], right, count);
        }
      }
    }
}

}  // namespace

void shuffle_xor(const void* mine, void* theirs, int bytes, int offset, u32 mask) {
  HERE;
  if (mask != ~0u) fail("shfl.sync whose mask lacks lanes of the warp, which all take part");
  Shuffle operands{mine, theirs, bytes, offset};
  execute_together("shfl.sync", &operands, [](int first) {
    for (int lane = 0; lane < 32; ++lane) {
      const Shuffle& to = operand<Shuffle>(first + lane);
      std::memcpy(to.theirs, operand<Shuffle>(first + (lane ^ to.offset)).mine, to.bytes);
    }
  });
}

// Lane l gets elements (l / 4, l % 4 * 2) and the next of each matrix; lanes 8 j to 8 j + 7 give
// the rows of matrix j.
void ldmatrix(u32* r, u32 address, bool trans) {
  HERE;
  if (address % 16) fail("ldmatrix at an address that is no multiple of 16");
  touch_registers(r, 4 * sizeof(u32), self().pc);
  Matrices operands{r, address, trans};
  execute_together("ldmatrix", &operands, [](int first) {
    unsigned char rows[32][16];
    for (int lane = 0; lane < 32; ++lane) {
      Thread& thread = threads[first + lane];
      const u32 from = operand<Matrices>(first + lane).address;
      const Event event = event_of(first + lane, thread.pc);
      check_shared(from, 16, {Kind::READ, event, &thread.clocks}, first + lane);
      std::memcpy(rows[lane], shared(from, 16), 16);
    }
    for (int lane = 0; lane < 32; ++lane) {
      const Matrices& to = operand<Matrices>(first + lane);
      for (int j = 0; j < 4; ++j) {
        gtco::u16 pair[2];
        for (int e = 0; e < 2; ++e) {
          const int row = to.trans ? lane % 4 * 2 + e : lane / 4;
          const int column = to.trans ? lane / 4 : lane % 4 * 2 + e;
          std::memcpy(&pair[e], rows[j * 8 + row] + column * 2, 2);
        }
        to.r[j] = pair[0] | u32(pair[1]) << 16;
      }
    }
  });
}

// A register has 4 bytes of a row. A: register i is row (i % 2) * 8 + l / 4, bytes (i / 2) * 16 +
// l % 4 * 4 of K's 32; B: register i is bytes i * 16 + l % 4 * 4, column l / 4; D: registers 2 i
// are rows i * 8 + l / 4, column l % 4 * 2.
void mma(void* d, const u32* a, u32 b0, u32 b1, Type type) {
  HERE;
  Multiply operands{d, a, {b0, b1}, type};
  execute_together("mma.sync", &operands, [](int first) {
    float left[16][32], right[8][32];
    int depth = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const Multiply& from = operand<Multiply>(first + lane);
      const int per_register = in_register(from.type);
      depth = 8 * per_register;
      for (int i = 0; i < 4; ++i)
        elements(&left[i % 2 * 8 + lane / 4][(i / 2 * 4 + lane % 4) * per_register], from.a[i],
                 from.type);
      for (int i = 0; i < 2; ++i)
        elements(&right[lane / 4][(i * 4 + lane % 4) * per_register], from.b[i], from.type);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int j = 0; j < 4; ++j) {
        const int row = j / 2 * 8 + lane / 4, column = lane % 4 * 2 + j % 2;
        const Multiply& of = operand<Multiply>(first + lane);
        if (of.type == Type::S8) {
          int& to = static_cast<int*>(of.d)[j];
          to = add_up(to, left[row], right[column], depth);
          continue;
        }
        float& to = static_cast<float*>(of.d)[j];
        if (of.type == Type::TF32) {
          double sum = to;
          for (int k = 0; k < depth; ++k) sum += double(left[row][k]) * right[column][k];
          to = cut_sum(sum);
        } else {
          to = add_up(to, left[row], right[column], depth);
        }
      }
  });
}

// -- wgmma

namespace {

// The first lane of a warp stands for it.
void read_by_product(u32 address) {
  Thread& thread = self();
  const Event event{product_agent(current), thread.product_groups + 1, cluster_number, thread.pc};
  check_shared(address, 16, {Kind::ASYNC_READ, event, &thread.clocks}, current);
}

// The 32 bytes of each row.
void read_rows(u64 tile, int first, int count) {
  for (int row = first; row < first + count; ++row)
    for (int byte = 0; byte < 32; byte += 16) read_by_product(place_in(tile, row, byte));
}

// B of a product with `n` columns.
void read_b(u64 tile, int n, bool by_rows) {
  if (!by_rows) return read_rows(tile, 0, n);
  for (int k = 0; k < 16; ++k)
    for (int column = 0; column < n; column += 8) read_by_product(place_in_rows(tile, k, column));
}

// Ordinary accesses to the registers of a product come before the fence.
void check_fence(const void* registers, std::size_t bytes) {
  if (!self().fenced || self().touched.meet(registers, bytes))
    fail("no wgmma.fence comes between an access to registers and the wgmma that uses them");
}

}  // namespace

// The thread's later products use registers as it has left them so far.
void wgmma_fence() {
  self().fenced = true;
  self().touched.clear();
}

// A warp reads its 16 rows of A and all of B.
void wgmma(void* d, int n, u64 a, u64 b, bool by_rows, bool accumulate, Type type) {
  HERE;
  check_fence(d, n / 2 * sizeof(float));
  self().open_products.push_back({d, n, a, b, by_rows, accumulate, type, nullptr, {}});
  if (current % 32 != 0) return;
  read_rows(a, current % block_threads % 128 / 32 * 16, 16);
  read_b(b, n, by_rows);
}

// A's registers lie as those of mma.sync, and are taken at once.
void wgmma_from_registers(float* d, int n, const u32* a, u64 b, bool by_rows, bool accumulate,
                          Type type) {
  HERE;
  check_fence(d, n / 2 * sizeof(float));
  check_fence(a, 4 * sizeof(u32));
  Product product{d, n, 0, b, by_rows, accumulate, type, a, {}};
  Fragment operands{a, product.rows, type};
  execute_together("wgmma", &operands, [](int first) {
    for (int lane = 0; lane < 32; ++lane)
      for (int from = lane / 4 * 4; from < lane / 4 * 4 + 4; ++from)
        for (int i = 0; i < 4; ++i) {
          const Fragment& part = operand<Fragment>(first + from);
          float (&row)[32] = operand<Fragment>(first + lane).rows[i % 2];
          const int per_register = in_register(part.type);
          elements(&row[(i / 2 * 4 + from % 4) * per_register], part.a[i], part.type);
        }
  });
  self().open_products.push_back(product);
  if (current % 32 == 0) read_b(b, n, by_rows);
}

void wgmma_commit() {
  Thread& thread = self();
  ++thread.product_groups;
  thread.products.push_back(std::move(thread.open_products));
  thread.open_products.clear();
}

void wgmma_wait(int pending) {
  HERE;
  Thread& thread = self();
  while (static_cast<int>(thread.products.size()) > pending) {
    for (const Product& product : thread.products.front()) multiply(product);
    thread.products.erase(thread.products.begin());
  }
  // A lane that goes on may hand back what the whole warp has read.
  execute_together("wgmma.wait_group", nullptr, [](int) {});
  thread.clocks.learn(product_agent(current), thread.product_groups - thread.products.size());
}

}  // namespace host
