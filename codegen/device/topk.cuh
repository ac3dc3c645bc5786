// The K largest or smallest elements of each row, in order, and where they are: a block a row.
//
// An element is told from all others by a number made of its bits, and where these are equal by its
// place: so there is one answer, equal elements come in the order of their places. The K-th is
// found digit by digit from the top, as by a radix sort that keeps one bucket: each thread counts
// its elements by the digit, of those that begin as the K-th does, and the block adds up. As soon
// as no more than LISTED elements are not behind what is known of it, they go to shared memory and
// are sorted there (Batcher's bitonic network, AFIPS 1968), of which the first K are the row's. No
// atomics: the same row gives the same bits.
//
// Config: Element, COLUMNS, K, LISTED (a power of two, at least 32 and K), LARGEST, THREADS.
// Row has at(row, col); Result has store_value(row, i, value) and store_place(row, i, place), of
// which one does nothing where nobody reads it.
#pragma once

#include "vector.cuh"

namespace gtco {

constexpr int DIGIT = 4;  // bits

__host__ __device__ constexpr int digits_of(int number) {
  return number == 0 ? 0 : 1 + digits_of(number >> DIGIT);
}

template <class Key>  // u32 or u64
struct Entry {
  Key key;
  Key rest;  // of equal keys the one with the smaller place has the larger rest
};

template <class Key>
__device__ __forceinline__ bool ahead_of(const Entry<Key>& a, const Entry<Key>& b) {
  return a.key > b.key || (a.key == b.key && a.rest > b.rest);
}

template <class Key>
__device__ __forceinline__ Entry<Key> shuffle_xor(const Entry<Key>& x, int offset) {
  const Key key = __shfl_xor_sync(~0u, x.key, offset);
  return {key, __shfl_xor_sync(~0u, x.rest, offset)};
}

// A number that is larger where the float with these bits is; equal for both zeros, the largest for
// NaN. `infinite` are the bits of infinity.
template <int BITS>
__device__ __forceinline__ u32 order_of_float(u32 bits, u32 infinite) {
  constexpr u32 SIGN = 1u << (BITS - 1), ALL = SIGN | (SIGN - 1);
  const u32 size = bits & ~SIGN;
  if (size > infinite) return ALL;
  if (size == 0) return SIGN;
  return bits & SIGN ? bits ^ ALL : bits | SIGN;
}

__device__ __forceinline__ u32 sort_key(half_t x) { return order_of_float<16>(x.bits, 0x7c00); }
__device__ __forceinline__ u32 sort_key(bf16_t x) { return order_of_float<16>(x.bits, 0x7f80); }
__device__ __forceinline__ u32 sort_key(float x) {
  return order_of_float<32>(__float_as_uint(x), 0x7f800000);
}
__device__ __forceinline__ u32 sort_key(i32 x) { return static_cast<u32>(x) ^ 1u << 31; }
__device__ __forceinline__ u64 sort_key(i64 x) { return static_cast<u64>(x) ^ 1ull << 63; }

// A thread's elements of one row, a block's width apart.
template <class C, class Row>
class RowEntries {
 public:
  using Element = typename C::Element;
  using Key = decltype(sort_key(Element{}));
  static constexpr int KEY_BITS = 8 * sizeof(Element);
  static constexpr int EACH = ceil_div(C::COLUMNS, C::THREADS);
  static constexpr bool HELD = EACH * sizeof(Key) <= 96;  // in registers

  __device__ __forceinline__ RowEntries(const Row& from, int row) : from_(from), row_(row) {
    if constexpr (HELD) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) keys_[i] = key_at(i);
    }
  }

  // f(entry) for each.
  template <class F>
  __device__ __forceinline__ void each(F f) const {
    if constexpr (HELD) {
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (inside(i)) f(Entry<Key>{keys_[i], rest(i)});
    } else {
#pragma unroll 8
      for (int i = 0; i < EACH; ++i) {
        const Key key = key_at(i);
        if (inside(i)) f(Entry<Key>{key, rest(i)});
      }
    }
  }

 private:
  __device__ __forceinline__ int col(int i) const { return i * C::THREADS + threadIdx.x; }
  __device__ __forceinline__ bool inside(int i) const {
    return C::COLUMNS % C::THREADS == 0 || col(i) < C::COLUMNS;
  }
  __device__ __forceinline__ Key rest(int i) const { return C::COLUMNS - 1 - col(i); }
  // Beyond the row that of its last element: loads in branches of their own wait for each other.
  __device__ __forceinline__ Key key_at(int i) const {
    const Key key = sort_key(*from_.at(row_, min_of(col(i), C::COLUMNS - 1)));
    return C::LARGEST ? key : key ^ ~Key(0) >> (8 * sizeof(Key) - KEY_BITS);
  }

  const Row& from_;
  int row_;
  Key keys_[HELD ? EACH : 1];
};

// The digit of the `need`-th largest of a block's elements, how many have a larger one, and how
// many have it.
struct Digit {
  u32 digit;
  int above, count;
};

// Of the threads' `counts`: 8 bits for each digit, those of eight in one number. `slots` are
// (WARPS, 16) of shared memory, which no thread reads any more.
template <int WARPS>
__device__ __forceinline__ Digit find_digit(const u64 (&counts)[2], int need, u32* slots) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Words of two digits with 16 bits each: of number (half, upper, odd), digit 8 half + 4 upper +
  // odd and the one two behind it.
  constexpr u64 EVEN = 0x00ff00ff00ff00ffull;
  u32 words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    words[i] = static_cast<u32>((counts[i / 4] >> (i % 2 * 8) & EVEN) >> (i / 2 % 2 * 32));
  // A lane passes on the half of its words that it does not add up, until it has word lane / 4.
#pragma unroll
  for (int size = 4; size > 0; size /= 2) {
    const bool later = lane & (4 * size);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      const u32 kept = later ? words[i + size] : words[i];
      const u32 passed = later ? words[i] : words[i + size];
      words[i] = kept + __shfl_xor_sync(~0u, passed, 4 * size);
    }
  }
  words[0] += __shfl_xor_sync(~0u, words[0], 2);
  words[0] += __shfl_xor_sync(~0u, words[0], 1);
  if (lane % 4 < 2) {
    const int counted = lane / 16 * 8 + lane / 8 % 2 * 4 + lane % 2 * 2 + lane / 4 % 2;
    slots[warp * 16 + counted] = lane % 2 ? words[0] >> 16 : words[0] & 0xffff;
  }
  __syncthreads();
  // Every warp does the rest, so that nobody waits for one of them.
  const int digit = lane % 16;
  int count = 0;
#pragma unroll
  for (int w = lane / 16; w < WARPS; w += 2) count += slots[w * 16 + digit];
  count += __shfl_xor_sync(~0u, count, 16);
  int total = count, above = 0;
#pragma unroll
  for (int offset = 1; offset < 16; offset *= 2) {
    const int other = __shfl_xor_sync(~0u, total, offset);
    if (!(digit & offset)) above += other;
    total += other;
  }
  const bool here = above < need && need <= above + count;
  u64 found = here ? u64(digit) << 48 | u64(above) << 24 | u64(count) : 0;
#pragma unroll
  for (int offset = 1; offset < 16; offset *= 2) found |= __shfl_xor_sync(~0u, found, offset);
  return {static_cast<u32>(found >> 48), static_cast<int>(found >> 24 & 0xffffff),
          static_cast<int>(found & 0xffffff)};
}

// The sum of `mine` over the threads before this one. `slots` are (WARPS) of shared memory.
template <int WARPS>
__device__ __forceinline__ int sum_before(int mine, u32* slots) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int total = mine, before = 0;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_xor_sync(~0u, total, offset);
    if (lane & offset) before += other;
    total += other;
  }
  if (lane == 0) slots[warp] = total;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; ++w) before += w < warp ? slots[w] : 0;
  return before;
}

// Puts `list`, of LISTED entries in shared memory, in order. The block has met before and meets at
// the end.
template <int THREADS, int LISTED, class Key>
__device__ __forceinline__ void sort_entries(Entry<Key>* list) {
  static_assert(LISTED % 32 == 0 && (LISTED & (LISTED - 1)) == 0, "warps have 32 entries each");
#pragma unroll 1
  for (int size = 2; size <= LISTED; size *= 2) {
#pragma unroll 1
    for (int apart = size / 2; apart >= 32; apart /= 2) {
#pragma unroll 1
      for (int i = threadIdx.x; i < LISTED / 2; i += THREADS) {
        const int first = 2 * i - i % apart, second = first + apart;
        const Entry<Key> a = list[first], b = list[second];
        if (ahead_of(first & size ? a : b, first & size ? b : a)) {
          list[first] = b;
          list[second] = a;
        }
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < LISTED; i += THREADS) {  // whole warps
      Entry<Key> own = list[i];
#pragma unroll 1
      for (int apart = min_of(size / 2, 16); apart > 0; apart /= 2) {
        const Entry<Key> other = shuffle_xor(own, apart);
        const bool takes_first = !(i & apart) == !(i & size);
        if (ahead_of(takes_first ? other : own, takes_first ? own : other)) own = other;
      }
      list[i] = own;
    }
    __syncthreads();
  }
}

template <class C, class Row, class Result>
__device__ __forceinline__ void topk(const Row& from, const Result& to) {
  using Entries = RowEntries<C, Row>;
  using Key = typename Entries::Key;
  constexpr int WARPS = C::THREADS / 32;
  constexpr int KEY_LEVELS = Entries::KEY_BITS / DIGIT;
  constexpr int LEVELS = KEY_LEVELS + digits_of(C::COLUMNS - 1);
  static_assert(Entries::EACH < 256, "a thread counts with 8 bits");
  extern __shared__ __align__(1024) unsigned char smem[];
  auto* list = reinterpret_cast<Entry<Key>*>(smem);                             // (LISTED)
  auto* slots = reinterpret_cast<u32*>(smem + C::LISTED * sizeof(Entry<Key>));  // (2, WARPS, 16)

  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  const int row = blockIdx.x;
  const Entries entries(from, row);

  // What begins as the K-th does: its digits so far, and which bits these are.
  Entry<Key> least{0, 0}, known{0, 0};
  int listed = C::COLUMNS;  // elements that are not behind `least`
  int turn = 0;             // slots are written again only after a later meeting
  if constexpr (C::COLUMNS > C::LISTED) {
    int need = C::K;
#pragma unroll 1
    for (int level = 0; level < LEVELS; ++level) {
      const bool of_key = level < KEY_LEVELS;
      const int shift = DIGIT * ((of_key ? KEY_LEVELS : LEVELS) - 1 - level);
      u64 counts[2] = {0, 0};
      entries.each([&](const Entry<Key>& entry) {
        // No branch: elements that begin as the K-th does are in few lanes of all warps.
        const bool alike =
            ((entry.key & known.key) ^ least.key | (entry.rest & known.rest) ^ least.rest) == 0;
        const u32 digit = static_cast<u32>((of_key ? entry.key : entry.rest) >> shift) & 15;
        const u64 one = static_cast<u64>(alike) << digit % 8 * 8;
        counts[0] += digit < 8 ? one : 0;
        counts[1] += digit < 8 ? 0 : one;
      });
      const Digit found = find_digit<WARPS>(counts, need, slots + turn * (WARPS * 16));
      turn ^= 1;
      need -= found.above;
      if (of_key) {
        least.key |= Key(found.digit) << shift;
        known.key |= Key(15) << shift;
      } else {
        least.rest |= Key(found.digit) << shift;
        known.rest |= Key(15) << shift;
      }
      listed = C::K - need + found.count;
      if (listed <= C::LISTED) break;  // the block as one: the first K of these are the row's
    }
  }

  int mine = 0;
  entries.each([&](const Entry<Key>& entry) { mine += !ahead_of(least, entry); });
  int at = sum_before<WARPS>(mine, slots + turn * (WARPS * 16));
  entries.each([&](const Entry<Key>& entry) {
    if (!ahead_of(least, entry)) list[at++] = entry;
  });
  for (int i = listed + threadIdx.x; i < C::LISTED; i += C::THREADS) list[i] = {0, 0};
  __syncthreads();
  sort_entries<C::THREADS, C::LISTED>(list);
  for (int i = threadIdx.x; i < C::K; i += C::THREADS) {
    const int place = C::COLUMNS - 1 - static_cast<int>(list[i].rest);
    to.store_value(row, i, *from.at(row, place));
    to.store_place(row, i, place);
  }
}

}  // namespace gtco
