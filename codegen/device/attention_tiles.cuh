// How tiles of queries, keys and values lie in shared memory for attention.cuh, and how they come
// there: by cp.async of all threads, or by TMA (Config::TMA) of one.
#pragma once

#include "epilogue.cuh"

namespace gtco {

// How rows of WIDTH elements lie in shared memory, in chunks of E elements.
template <int WIDTH, int E = 8>
struct ChunkedRows {
  static_assert(WIDTH % (2 * E) == 0, "mma takes two chunks at a time");
  static constexpr int ELEMENTS = E, CHUNKS = WIDTH / E;
  static constexpr bool POWER_OF_TWO = (CHUNKS & (CHUNKS - 1)) == 0;
  // Eight neighbouring rows meet eight different 16-byte banks: by XOR where chunks fill whole
  // lines, by an odd pitch where they do not.
  static constexpr int PITCH = POWER_OF_TWO ? CHUNKS : CHUNKS + 1;
  static constexpr int SHIFT = CHUNKS >= 8 ? 0 : (CHUNKS == 4 ? 1 : 2);

  // Elements from the tile's start to (row, E * chunk).
  __device__ __forceinline__ static int offset(int row, int chunk) {
    if constexpr (POWER_OF_TWO) chunk ^= (row >> SHIFT) & min_of(CHUNKS - 1, 7);
    return (row * PITCH + chunk) * E;
  }
};

// How TMA puts boxes of rows there: ROWS of them, in atoms of 32, 64 or 128 bytes of columns, one
// atom behind the other, whose swizzle is the same XOR. So one atom lies as ChunkedRows do. Of
// WHOLE ones each has 128 bytes, which is what wgmma reads, however few chunks there are.
template <int ROWS, int WIDTH, int E, bool WHOLE = false>
struct AtomRows {
  static constexpr int CHUNKS = WIDTH / E;
  static constexpr int ATOM_CHUNKS = WHOLE || CHUNKS > 4 ? 8 : CHUNKS <= 2 ? 2 : 4;
  static constexpr int ATOMS = ceil_div(CHUNKS, ATOM_CHUNKS), PITCH = ATOMS * ATOM_CHUNKS;

  // Elements from the tile's start to (row, E * chunk).
  __device__ __forceinline__ static int offset(u32 row, u32 chunk) {
    const u32 atom = chunk / ATOM_CHUNKS, moved = row / (8 / ATOM_CHUNKS) ^ chunk;
    return ((atom * ROWS + row) * ATOM_CHUNKS + moved % ATOM_CHUNKS) * E;
  }
};

template <class Config, class = void>
struct UsesTma : Constant<bool, false> {};
template <class Config>
struct UsesTma<Config, decltype(static_cast<void>(Config::TMA))> : Constant<bool, Config::TMA> {};

template <class Config, class = void>
struct HasWholeAtoms : Constant<bool, false> {};
template <class Config>
struct HasWholeAtoms<Config, decltype(static_cast<void>(Config::WHOLE_ATOMS))>
    : Constant<bool, Config::WHOLE_ATOMS> {};

template <class Config, int ROWS, int WIDTH, int E, bool TMA = UsesTma<Config>::value>
struct TileRows : ChunkedRows<WIDTH, E> {};
template <class Config, int ROWS, int WIDTH, int E>
struct TileRows<Config, ROWS, WIDTH, E, true>
    : AtomRows<ROWS, WIDTH, E, HasWholeAtoms<Config>::value> {};

// Elements of an operand that lie side by side and are copied at once, where they are fewer than a
// chunk's.
template <class Operand, int CHUNK, class = void>
struct RunOf {
  static constexpr int value = CHUNK;
};
template <class Operand, int CHUNK>
struct RunOf<Operand, CHUNK, decltype(void(Operand::RUN))> {
  static constexpr int value = Operand::RUN;
};

// Starts the copy of rows [row0, row0 + ROWS) of `operand`; zeros beyond row_count and COLUMNS.
template <int ROWS, int COLUMNS, int THREADS, class Layout, class Element, class Operand>
__device__ __forceinline__ void copy_rows(Element* tile, const Operand& operand, int head, int row0,
                                          int row_count, int thread) {
  constexpr int ITEMS = ROWS * Layout::CHUNKS, E = Layout::ELEMENTS, RUN = RunOf<Operand, E>::value;
  static_assert(COLUMNS % RUN == 0 && E % RUN == 0, "whole runs");
#pragma unroll 4
  for (int step = 0; step < ceil_div(ITEMS, THREADS); ++step) {
    const int item = thread + step * THREADS;
    if (ITEMS % THREADS != 0 && item >= ITEMS) break;
    const int r = item / Layout::CHUNKS, chunk = item % Layout::CHUNKS;
#pragma unroll
    for (int run = 0; run < E; run += RUN) {
      const bool valid =
          row0 + r < row_count && (Layout::CHUNKS * E == COLUMNS || chunk * E + run < COLUMNS);
      const Element* from = valid ? operand.at(head, row0 + r, chunk * E + run) : operand.base;
      ptx::cp_async<RUN * sizeof(Element)>(
          ptx::shared_address(tile + Layout::offset(r, chunk) + run), from, valid);
    }
  }
}

// A block's tiles: its queries, and rings of STAGES tiles of keys and of values, which it goes
// through once. In the loop of a tile the calls are await_keys, ask_ahead, leave_keys,
// await_values and leave_values.
//
// By cp.async, of which all threads start their part and wait for all at a block barrier. Here each
// tile is two groups of copies, keys and then values; empty ones past the last tile.
template <class C, class Warp, int THREADS, bool TMA = UsesTma<C>::value>
class Tiles {
 public:
  using Element = typename C::Element;
  using KeyRows = typename Warp::KeyRows;
  using ValueRows = typename Warp::ValueRows;

  __device__ __forceinline__ Tiles(unsigned char* smem, int thread, int head, int query0, int tiles)
      : q_tile_(reinterpret_cast<Element*>(smem)),
        k_ring_(q_tile_ + Q_TILE),
        v_ring_(k_ring_ + C::STAGES * K_TILE),
        thread_(thread),
        head_(head),
        query0_(query0),
        tiles_(tiles) {}

  __device__ __forceinline__ const Element* queries() const { return q_tile_; }
  __device__ __forceinline__ const Element* keys(int slot) const { return k_ring_ + slot * K_TILE; }
  __device__ __forceinline__ const Element* values(int slot) const {
    return v_ring_ + slot * V_TILE;
  }

  __device__ __forceinline__ int count() const { return tiles_; }

  // Before the dependent-launch wait.
  template <class Q, class K, class V>
  __device__ __forceinline__ void prepare(const Q&, const K&, const V&) const {}

  // Asks for the queries and the first tiles of keys and values.
  template <class Q, class K, class V>
  __device__ __forceinline__ void start(const Q& queries, const K& keys, const V& values) const {
    copy_rows<C::BLOCK_Q, C::D, THREADS, KeyRows>(q_tile_, queries, head_, query0_, C::LQ, thread_);
#pragma unroll
    for (int tile = 0; tile < AHEAD; ++tile) copy_tile(keys, values, tile);  // first, queries too
  }

  // The tile's keys are there, with the first ones the queries, and the tile before is used up.
  __device__ __forceinline__ void await_keys(int) const {
    ptx::cp_async_wait<2 * AHEAD - 1>();
    __syncthreads();  // this tile's keys are there, and the tile before is used up
  }
  template <class K, class V>
  __device__ __forceinline__ void ask_ahead(const K& keys, const V& values, int tile) const {
    if constexpr (C::STAGES > 1) copy_tile(keys, values, tile + AHEAD);
  }
  template <class K, class V>
  __device__ __forceinline__ void leave_keys(const K&, const V&, int) const {}
  __device__ __forceinline__ void await_values() const {
    ptx::cp_async_wait<C::STAGES == 1 ? 0 : 2 * AHEAD>();
    __syncthreads();  // this tile's values are there
  }
  template <class K, class V>
  __device__ __forceinline__ void leave_values(const K& keys, const V& values, int tile) const {
    if constexpr (C::STAGES == 1) {
      __syncthreads();
      copy_tile(keys, values, tile + 1);
    }
  }

 private:
  static constexpr int Q_TILE = C::BLOCK_Q * KeyRows::PITCH * Warp::E;
  static constexpr int K_TILE = C::BLOCK_K * KeyRows::PITCH * Warp::E;
  static constexpr int V_TILE = C::BLOCK_K * ValueRows::PITCH * Warp::E;
  static constexpr bool ALL_IN_FLIGHT = ceil_div(C::LK, C::BLOCK_K) <= C::STAGES;  // no slot twice
  static constexpr int AHEAD = ALL_IN_FLIGHT ? C::STAGES : max_of(1, C::STAGES - 1);

  template <class K, class V>
  __device__ __forceinline__ void copy_tile(const K& keys, const V& values, int tile) const {
    const int slot = tile % C::STAGES;
    if (tile < tiles_)
      copy_rows<C::BLOCK_K, C::D, THREADS, KeyRows>(k_ring_ + slot * K_TILE, keys, head_,
                                                    tile * C::BLOCK_K, C::LK, thread_);
    ptx::cp_async_commit();
    if (tile < tiles_)
      copy_rows<C::BLOCK_K, C::DV, THREADS, ValueRows>(v_ring_ + slot * V_TILE, values, head_,
                                                       tile * C::BLOCK_K, C::LK, thread_);
    ptx::cp_async_commit();
  }

  Element *const q_tile_, *const k_ring_, *const v_ring_;  // (BLOCK_Q, D), (STAGES, BLOCK_K, D), DV
  const int thread_, head_, query0_, tiles_;
};

#if __CUDA_ARCH__ >= 900
// By TMA, of which the first thread asks for all; `copy(to, column, row, head, barrier)` of an
// operand brings a box of BLOCK_Q or BOX rows and an atom of columns, zeros beyond the last of a
// head. Each slot's keys and values have a barrier of theirs being there, which counts bytes, and
// one of their being used up, at which each warp arrives that is done with them. So no warp waits
// for another but the first, which asks for the next tiles when it has a tile's scores: for keys in
// place of that tile's, for values in place of those of the tile before. A warp that has none of
// the last tile's keys leaves out leave_keys: nothing is to come in their place.
template <class C, class Warp, int THREADS>
class Tiles<C, Warp, THREADS, true> {
 public:
  using Element = typename C::Element;
  using QueryRows = typename Warp::QueryRows;
  using KeyRows = typename Warp::KeyRows;
  using ValueRows = typename Warp::ValueRows;
  static constexpr int STAGES = C::STAGES, WARPS = C::BLOCK_Q / 16 * C::WARPS_K;
  static_assert(THREADS == WARPS * 32, "no warp is there to copy alone");
  static_assert(C::BLOCK_K % C::BOX == 0 && C::BOX % 8 == 0, "even parts, whole rows of a swizzle");

  __device__ __forceinline__ Tiles(unsigned char* smem, int thread, int head, int query0, int tiles)
      : smem_(smem),
        barriers_(ptx::shared_address(smem + C::BARRIERS_AT)),
        thread_(thread),
        head_(head),
        query0_(query0),
        tiles_(tiles) {}

  __device__ __forceinline__ const Element* queries() const {
    return reinterpret_cast<const Element*>(smem_);
  }
  __device__ __forceinline__ const Element* keys(int slot) const {
    return reinterpret_cast<const Element*>(smem_ + C::KEYS_AT + slot * K_BYTES);
  }
  __device__ __forceinline__ const Element* values(int slot) const {
    return reinterpret_cast<const Element*>(smem_ + C::VALUES_AT + slot * V_BYTES);
  }

  __device__ __forceinline__ int count() const { return tiles_; }

  template <class Q, class K, class V>
  __device__ __forceinline__ void prepare(const Q& queries, const K& keys, const V& values) const {
    if (thread_ == 0) {
      ptx::mbarrier_init(barriers_, 1);
      for (int s = 0; s < STAGES; ++s) {
        ptx::mbarrier_init(keys_full(s), 1);
        ptx::mbarrier_init(values_full(s), 1);
        if constexpr (!ALL_IN_FLIGHT) {
          ptx::mbarrier_init(keys_empty(s), WARPS);
          ptx::mbarrier_init(values_empty(s), WARPS);
        }
      }
      ptx::fence_mbarrier_init();
      queries.prefetch();
      keys.prefetch();
      values.prefetch();
    }
    __syncthreads();
  }

  template <class Q, class K, class V>
  __device__ __forceinline__ void start(const Q& queries, const K& keys, const V& values) const {
    if (thread_ == 0) {
      copy<QueryRows, C::BLOCK_Q, C::BLOCK_Q>(queries, this->queries(), query0_, barriers_);
#pragma unroll 1
      for (int tile = 0; tile < min_of(tiles_, STAGES); ++tile) {
        copy_keys(keys, tile);
        copy_values(values, tile);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void await_keys(int tile) const {
    if (tile == 0) ptx::mbarrier_wait(barriers_, 0);
    await(keys_full(tile % STAGES), tile);
  }
  template <class K, class V>
  __device__ __forceinline__ void ask_ahead(const K&, const V&, int) const {}
  template <class K, class V>
  __device__ __forceinline__ void leave_keys(const K& keys, const V& values, int tile) const {
    const int slot = tile % STAGES;
    if constexpr (!ALL_IN_FLIGHT) {
      leave(keys_empty(slot), tile);
      refill(values_empty((tile + STAGES - 1) % STAGES), tile - 1,
             [&](int next) { copy_values(values, next); });
      refill(keys_empty(slot), tile, [&](int next) { copy_keys(keys, next); });
    }
    // Not between the exponentials and the product, which overlap where no branch parts them.
    await(values_full(slot), tile);
  }
  __device__ __forceinline__ void await_values() const {}
  template <class K, class V>
  __device__ __forceinline__ void leave_values(const K&, const V&, int tile) const {
    if constexpr (!ALL_IN_FLIGHT) leave(values_empty(tile % STAGES), tile);
  }

 private:
  static constexpr int K_BYTES = C::BLOCK_K * KeyRows::PITCH * 16;
  static constexpr int V_BYTES = C::BLOCK_K * ValueRows::PITCH * 16;
  static constexpr bool ALL_IN_FLIGHT = ceil_div(C::LK, C::BLOCK_K) <= STAGES;  // no slot twice

  __device__ __forceinline__ u32 keys_full(int slot) const { return barriers_ + 8 * (1 + slot); }
  __device__ __forceinline__ u32 values_full(int slot) const { return keys_full(STAGES + slot); }
  __device__ __forceinline__ u32 keys_empty(int slot) const { return keys_full(2 * STAGES + slot); }
  __device__ __forceinline__ u32 values_empty(int slot) const {
    return keys_full(3 * STAGES + slot);
  }
  // The parity of a tile's turn with its slot.
  __device__ __forceinline__ static u32 round(int tile) { return tile / STAGES & 1; }

  __device__ __forceinline__ static void await(u32 full, int tile) {
    ptx::mbarrier_wait(full, round(tile));
    __syncwarp();  // ldmatrix takes whole warps
  }

  // Asks for a tile of ROWS rows in boxes of BOX.
  template <class Rows, int ROWS, int BOX, class Operand>
  __device__ __forceinline__ void copy(const Operand& operand, const Element* tile, int row0,
                                       u32 barrier) const {
    constexpr int BOXES = ROWS / BOX, ROW_BYTES = Rows::ATOM_CHUNKS * 16;
    const u32 to = ptx::shared_address(tile);
    ptx::mbarrier_arrive_expect_tx(barrier, Rows::ATOMS * ROWS * ROW_BYTES);
#pragma unroll
    for (int i = 0; i < Rows::ATOMS * BOXES; ++i)
      operand.copy(to + i * BOX * ROW_BYTES, i / BOXES * Rows::ATOM_CHUNKS * Warp::E,
                   row0 + i % BOXES * BOX, head_, barrier);
  }
  template <class K>
  __device__ __forceinline__ void copy_keys(const K& operand, int tile) const {
    copy<KeyRows, C::BLOCK_K, C::BOX>(operand, keys(tile % STAGES), tile * C::BLOCK_K,
                                      keys_full(tile % STAGES));
  }
  template <class V>
  __device__ __forceinline__ void copy_values(const V& operand, int tile) const {
    copy<ValueRows, C::BLOCK_K, C::BOX>(operand, values(tile % STAGES), tile * C::BLOCK_K,
                                        values_full(tile % STAGES));
  }

  // This warp is done with what `tile` has in a slot that another tile is to have.
  __device__ __forceinline__ void leave(u32 empty, int tile) const {
    if (tile + STAGES >= tiles_) return;
    __syncwarp();
    if (thread_ % 32 == 0) ptx::mbarrier_arrive(empty);
  }
  // The first thread asks for the tile that is to have the slot of `tile`, when that is used up.
  template <class Ask>
  __device__ __forceinline__ void refill(u32 empty, int tile, const Ask& ask) const {
    if (thread_ == 0 && tile >= 0 && tile + STAGES < tiles_) {
      ptx::mbarrier_wait(empty, round(tile));
      ask(tile + STAGES);
    }
    __syncwarp();
  }

  unsigned char* const smem_;  // as Tiles of cp.async, in atoms
  const u32 barriers_;
  const int thread_, head_, query0_, tiles_;
};
#endif

}  // namespace gtco
