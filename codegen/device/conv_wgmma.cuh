// A convolution of patches (patches.cuh) on wgmma by blocks that stay. One thread fills rings of
// mbarriers by TMA: pixels, with zeros around the image, and weights, both in rows of a step's
// channels, swizzled. Each consumer warpgroup has patches of its own: where weights stay in shared
// memory it has a ring of its own too, so that one multiplies while another runs its epilogue; else
// all share the weights of a stage, which holds a patch for each.
//
// Pixels come into registers by ldmatrix, so that the rows of taps share them: a warp's 16 rows are
// neighbours of one line, and the fragments of a warp the lines below one another.
#pragma once

#include "mma.cuh"
#include "patches.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

namespace gtco {

#if __CUDA_ARCH__ >= 900
// What shared memory holds, in bytes. A step is of the channels of one piece of the image: pixels
// of a patch in rows of ROW. Weights come in atoms, all taps of BLOCK_N columns in rows of
// WEIGHT_ROW: where they stay, of as many channels as there are up to 64, else of a step's.
template <class C, class Windows>
struct PatchRing : Patch<C, Windows, false> {
  using Base = Patch<C, Windows, false>;
  static constexpr bool KEEPS = C::KEEPS_WEIGHTS;
  static constexpr int CHANNELS = C::CHUNKS * Base::CHUNK, ROW = C::CHUNKS * 16;
  static constexpr int STEPS = atoms_of_tap<Windows, CHANNELS>();
  static constexpr int WEIGHT_ROW = C::WEIGHT_CHUNKS * 16;
  static constexpr int WEIGHT_CHANNELS = C::WEIGHT_CHUNKS * Base::CHUNK;
  static constexpr int TAP = C::BLOCK_N * WEIGHT_ROW, ATOM_BYTES = Base::TAPS * TAP;
  static constexpr int ATOM = ceil_div(ATOM_BYTES, 1024) * 1024;
  static constexpr int PIXEL_BYTES = Base::PIXELS * ROW;
  static constexpr int IMAGE = ceil_div(PIXEL_BYTES, 1024) * 1024;
  static constexpr int RINGS = KEEPS ? C::CONSUMERS : 1;
  static constexpr int SHARERS = C::CONSUMERS / RINGS;  // of a ring, and patches of a stage
  static constexpr int STAGE = (KEEPS ? 0 : ATOM) + SHARERS * IMAGE;
};

// Config as of conv_wgmma.
template <class C, class Windows, int PART>
class WgmmaProducts {
  using Ring = PatchRing<C, Windows>;
  using W = typename Ring::W;
  static constexpr int TILES = C::TILE_T * C::TILE_H * C::TILE_W / 64;
  // A warp's lines below one another, and how many such runs it has. The rows of taps that go
  // TOGETHER share what is HELD of the image.
  static constexpr int RUN = min_of(TILES, C::TILE_H / 4), RUNS = TILES / RUN;
  static constexpr bool SHARES = W::STRIDE_H == 1 && W::DILATION_H == 1;
  static constexpr int TOGETHER = SHARES ? W::KERNEL_H : 1, HELD = RUN + TOGETHER - 1;
  static constexpr int ROUNDS = Ring::TAPS / TOGETHER, PAIRS = C::CHUNKS / 2;
  // Of pixels in registers: the products of one go on while the other is filled.
  // The assembler lets products overlap around a loop only where it sees which registers these are.
  static constexpr int BUFFERS = 2, UNROLL = PAIRS % BUFFERS == 0 ? 1 : ROUNDS;  // rounds

 public:
  static constexpr int PARTS = C::BLOCK_N % PART == 0 ? C::BLOCK_N / PART : 1;
  static constexpr int FRAGMENTS = TILES * PARTS, COLUMNS = C::BLOCK_N / PARTS;
  static constexpr int LOOP = TILES * C::BLOCK_N / 2 + BUFFERS * RUNS * HELD * 4 + 56;

  __device__ __forceinline__ WgmmaProducts()
      : first_(static_cast<int>(threadIdx.x) % 128 / 32 * (RUN * 16)) {}

  __device__ __forceinline__ int row(int i) const { return first_ + tile_row(i / PARTS); }
  __device__ __forceinline__ int column(int i) const { return i % PARTS * COLUMNS; }
  __device__ __forceinline__ void clear() { empty_ = true; }

  __device__ __forceinline__ void sums(int i, float (&to)[COLUMNS / 2]) const {
#pragma unroll
    for (int e = 0; e < COLUMNS / 2; ++e) to[e] = acc_[i / PARTS][i % PARTS * (COLUMNS / 2) + e];
  }

  // Adds the products of a stage, whose weights begin `chunk` chunks of a row behind `weights`.
  // Those of the stage before are done.
  __device__ __forceinline__ void multiply(u32 weights, int chunk, u32 image) {
    int add = !empty_;
    empty_ = false;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round += UNROLL) {
      multiply_rounds(round, weights, chunk, image, add);
      add = 1;
    }
  }

  __device__ __forceinline__ void wait() {
#pragma unroll
    for (int i = 0; i < TILES; ++i) ptx::wgmma_wait_group<0>(acc_[i]);
  }

 private:
  // Adds the products of UNROLL rounds of taps that go together, from `first` on.
  __device__ __forceinline__ void multiply_rounds(int first, u32 weights, int chunk, u32 image,
                                                  int add) {
    const int lane = threadIdx.x % 32, half = lane / 16 * 16;  // bytes of K's 32
    int pixel[UNROLL];
    u32 weights_of[UNROLL][PAIRS];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      // The first tap of a round, from which the others are KERNEL_W apart.
      const int round = first + u;
      const int tap =
          SHARES ? round / W::KERNEL_W * (W::KERNEL_H * W::KERNEL_W) + round % W::KERNEL_W : round;
      pixel[u] = Ring::first_pixel(first_ + lane % 16) + Ring::tap(tap);
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair)
        weights_of[u][pair] = of_pair(weights, chunk, pair) + tap * Ring::TAP;
    }
#pragma unroll
    for (int turn = 0; turn < UNROLL * PAIRS; ++turn) {
      const int u = turn / PAIRS, pair = turn % PAIRS;
      u32(&now)[RUNS][HELD][4] = held_[turn % BUFFERS];
      ptx::wgmma_wait_group<BUFFERS - 1>();  // the last products that had these registers are done
#pragma unroll
      for (int run = 0; run < RUNS; ++run)
#pragma unroll
        for (int line = 0; line < HELD; ++line)
          ptx::ldmatrix_x4(now[run][line],
                           image + chunk_of(pixel[u] + Ring::first_pixel(tile_row(run * RUN)) +
                                                line * W::STRIDE_H * Ring::PITCH,
                                            pair * 32 + half));
      ptx::wgmma_fence();
#pragma unroll
      for (int y = 0; y < TOGETHER; ++y)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
          ptx::WgmmaFromRegisters<typename C::Element, C::BLOCK_N, true>::mma(
              acc_[i], now[i / RUN][i % RUN + y],
              ptx::wgmma_descriptor<Ring::WEIGHT_ROW>(weights_of[u][pair],
                                                      y * (W::KERNEL_W * Ring::TAP)),
              y == 0 && turn == 0 ? add : 1);
      ptx::wgmma_commit_group();
    }
  }
  // Where 16 bytes of a pixel lie, from `byte` of its row on: rows are swizzled.
  __device__ __forceinline__ static u32 chunk_of(int pixel, int byte) {
    const u32 row = pixel * Ring::ROW;
    return row + (byte ^ (row >> 7 & (C::CHUNKS - 1)) << 4);
  }
  // Where the weights of a pair of chunks begin: the atoms that stay are of any steps.
  __device__ __forceinline__ static u32 of_pair(u32 weights, int chunk, int pair) {
    if constexpr (!Ring::KEEPS) return weights + pair * 32;
    constexpr int CHUNKS = C::WEIGHT_CHUNKS;
    const int at = chunk + pair * 2;
    return weights + at / CHUNKS * Ring::ATOM + at % CHUNKS * 16;
  }
  // How far the rows of a warp's tile `i` are behind its first.
  __device__ __forceinline__ static constexpr int tile_row(int i) {
    return i / RUN * (64 * RUN) + i % RUN * 16;
  }

  const int first_;  // row of the warp
  bool empty_ = true;
  u32 held_[BUFFERS][RUNS][HELD][4];
  float acc_[TILES][C::BLOCK_N / 2];
};

// What the copy engine brings of patches and weights.
template <class C, class Windows>
struct PatchCopies {
  using Ring = PatchRing<C, Windows>;
  using W = typename Ring::W;
  // A copy of weights is of 32 columns in the order in which a lane has eight side by side (WIDTH):
  // column 8 t + 2 j + e comes as 8 j + 2 t + e. Else, or where these are all, it is of all taps.
  static constexpr int COLUMNS = C::WIDTH == 8 ? 32 : C::BLOCK_N;
  static constexpr int TAPS = COLUMNS == C::BLOCK_N ? Ring::TAPS : 1;

  const ptx::TensorMap& image_map;
  const MoreMaps<pieces_of<Windows> - 1>& more;
  const ptx::TensorMap& weights_map;
  int group, first_column;

  // All taps' of the atom that begins at `channel`.
  __device__ __forceinline__ void weights(u32 to, int channel, u32 barrier) const {
#pragma unroll 1
    for (int tap = 0; tap < Ring::TAPS; tap += TAPS)
#pragma unroll
      for (int n = 0; n < C::BLOCK_N; n += COLUMNS) {
        const u32 at = to + tap * Ring::TAP + n * Ring::WEIGHT_ROW;
        if constexpr (C::WIDTH == 8) {
          ptx::cp_async_bulk_tensor(at, weights_map, channel, 0, (first_column + n) / 8, 0, tap,
                                    barrier);
        } else {
          ptx::cp_async_bulk_tensor(at, weights_map, channel, first_column + n, tap, barrier);
        }
      }
  }

  __device__ __forceinline__ void image(u32 to, int patch, int step, u32 barrier) const {
    const AtomPlace place = atom_place<Windows, Ring::CHANNELS>(step);
    const ptx::TensorMap* map = &image_map;
    if constexpr (pieces_of<Windows> > 1) {
#pragma unroll
      for (int piece = 1; piece < pieces_of<Windows>; ++piece)
        if (place.piece == piece) map = more.of[piece - 1];
    }
    const Pixel origin = Ring::origin(patch);
    ptx::cp_async_bulk_tensor(to, *map, group * Windows::CHANNELS + place.channel,
                              origin.x * W::STRIDE_W - W::BEFORE_W,
                              origin.y * W::STRIDE_H - W::BEFORE_H,
                              origin.z * W::STRIDE_T - W::BEFORE_T, origin.image, barrier);
  }
};

// Config: Element, N (columns of a group), TILE_T, TILE_H, TILE_W (powers of two, TILE_H at least
// 4, TILE_W 16), BLOCK_N, CHUNKS (16 bytes of channels a step: 2, 4 or 8), WEIGHT_CHUNKS (of an
// atom of weights, likewise), ATOMS (that stay, if any), CONSUMERS (warpgroups), STAGES (of a
// ring), KEEPS_WEIGHTS (those of all steps, else a stage has its own), B_CONSTANT (the weights),
// PATCHES, BLOCKS (that share them), WIDTH (of the epilogue's lanes), BARRIERS_AT (bytes), and
// GROUPED as of gemm_mma. 128 threads a consumer and 128 more.
template <class C, class Windows, class Functor>
__device__ __forceinline__ void conv_wgmma(const ptx::TensorMap& image_map,
                                           const ptx::TensorMap& weights_map,
                                           const Functor& functor,
                                           const MoreMaps<pieces_of<Windows> - 1>& more = {}) {
  using Ring = PatchRing<C, Windows>;
  constexpr int PART = Functor::ROW_STATS ? STATS_CHUNK : 32;
  constexpr int STEPS = Ring::STEPS, SHARERS = Ring::SHARERS, RINGS = Ring::RINGS;
  constexpr int SLOTS = RINGS * C::STAGES;
  constexpr int ATOMS = C::ATOMS;
  constexpr bool KEEPS = Ring::KEEPS;
  static_assert(C::TILE_W % 16 == 0 && C::TILE_H % 4 == 0, "a fragment is of one line");
  static_assert(C::CHUNKS == 2 || C::CHUNKS == 4 || C::CHUNKS == 8, "rows that are swizzled");
  // Of 65536 a multiprocessor, that all threads begin with in even parts.
  constexpr bool ALONE = C::CONSUMERS == 1;  // and has as many as there can be
  constexpr int PRODUCER_REGISTERS = 24;
  constexpr int CONSUMER_REGISTERS = ALONE ? 255 : C::CONSUMERS == 2 ? 240 : 160;
  // What is fetched row by row has to fit into what the assembler keeps to: even parts.
  constexpr int EVEN_REGISTERS = min_of(255, 65536 / (128 * (C::CONSUMERS + 1)));
  constexpr int EPILOGUE_REGISTERS = Functor::INPUTS_BY_ROW ? EVEN_REGISTERS : CONSUMER_REGISTERS;
  constexpr int PRODUCER = C::CONSUMERS * 128;  // the thread
  constexpr int UNITS = ceil_div(C::PATCHES, SHARERS);
  constexpr u32 STAGE_BYTES =  // that arrive
      (KEEPS ? 0 : Ring::ATOM_BYTES) + SHARERS * Ring::PIXEL_BYTES;
  static_assert(C::BLOCKS <= UNITS, "every block has a patch");

  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 kept = ptx::shared_address(smem);  // (ATOMS, ATOM)
  const u32 ring = kept + ATOMS * Ring::ATOM;  // (SLOTS, STAGE)
  const u32 full = ptx::shared_address(smem + C::BARRIERS_AT);
  const u32 empty = full + 8 * SLOTS, kept_full = empty + 8 * SLOTS;

  const int n0 = in_order(blockIdx.y, gridDim.y) * C::BLOCK_N;
  const int group = in_order(blockIdx.z, gridDim.z);
  const auto place_of = [](int step) { return atom_place<Windows, Ring::CHANNELS>(step); };
  if (threadIdx.x == 0) {
    for (int s = 0; s < SLOTS; ++s) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, 4 * SHARERS);
    }
    for (int atom = 0; atom < ATOMS; ++atom) ptx::mbarrier_init(kept_full + 8 * atom, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (threadIdx.x >= PRODUCER) {
    if constexpr (!ALONE) ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    const PatchCopies<C, Windows> copies{image_map, more, weights_map, group,
                                         (IsGrouped<C>::value ? group * C::N : 0) + n0};
    const auto copy_kept = [&] {
#pragma unroll 1
      for (int atom = 0; atom < ATOMS; ++atom) {
        ptx::mbarrier_arrive_expect_tx(kept_full + 8 * atom, Ring::ATOM_BYTES);
        copies.weights(kept + atom * Ring::ATOM, atom * Ring::WEIGHT_CHANNELS,
                       kept_full + 8 * atom);
      }
    };
    // Weights need not wait for the kernel before; of those that do not stay, the first.
    constexpr int AHEAD = KEEPS || !C::B_CONSTANT ? 0 : min_of(C::STAGES, STEPS);
    if (threadIdx.x == PRODUCER) {
      ptx::prefetch_tensormap(image_map);
      ptx::prefetch_tensormap(weights_map);
      if constexpr (KEEPS && C::B_CONSTANT) copy_kept();
#pragma unroll 1
      for (int step = 0; step < AHEAD; ++step) {
        ptx::mbarrier_arrive_expect_tx(full + 8 * step, STAGE_BYTES);
        copies.weights(ring + step * Ring::STAGE, place_of(step).k, full + 8 * step);
      }
    }
    __syncwarp();  // so that no lane's wait holds these copies up
    ptx::griddepcontrol_wait();
    if (threadIdx.x > PRODUCER) return;
    if constexpr (KEEPS && !C::B_CONSTANT) copy_kept();
    RingPlace<C::STAGES> round{0, 0};
    int ahead = AHEAD;  // steps whose weights are asked for
#pragma unroll 1
    for (int first = blockIdx.x; first < UNITS; first += RINGS * C::BLOCKS) {
#pragma unroll 1
      for (int i = 0; i < RINGS; ++i) {
        const int unit = first + i * C::BLOCKS;
        if (unit >= UNITS) break;
        RingPlace<C::STAGES> to = round;
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step, to.advance()) {
          const int slot = i * C::STAGES + to.slot;
          const u32 stage = ring + slot * Ring::STAGE, barrier = full + 8 * slot;
          if (step >= ahead) {
            // The slots' first round waits for a phase before the first, which is over.
            ptx::mbarrier_wait(empty + 8 * slot, to.phase ^ 1);
            ptx::mbarrier_arrive_expect_tx(barrier, STAGE_BYTES);
            if constexpr (!KEEPS) copies.weights(stage, place_of(step).k, barrier);
          }
#pragma unroll
          for (int j = 0; j < SHARERS; ++j)
            copies.image(stage + (KEEPS ? 0 : Ring::ATOM) + j * Ring::IMAGE,
                         min_of(unit * SHARERS + j, C::PATCHES - 1), step, barrier);
        }
        ahead = 0;
      }
      round.template skip<STEPS>();
    }
    // Blocks of the next kernel fit only where one of this has ended: the earlier they are told,
    // the earlier they bring their weights.
    ptx::griddepcontrol_launch_dependents();
    return;
  }

  if constexpr (!ALONE) ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
  ptx::griddepcontrol_wait();
  const int consumer = ptx::uniform(threadIdx.x / 128);
  const int first_slot = KEEPS ? consumer * C::STAGES : 0;
  const auto release = [&](int slot) {
    __syncwarp();  // all lanes' loads of pixels
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty + 8 * slot);
  };
  WgmmaProducts<C, Windows, PART> products;
  PatchEpilogue<EPILOGUE_REGISTERS, C, Windows, WgmmaProducts<C, Windows, PART>, Functor> epilogue(
      functor, products, group, n0);
  epilogue.begin();
  RingPlace<C::STAGES> from{0, 0};
#pragma unroll 1
  for (int unit = blockIdx.x + (KEEPS ? consumer * C::BLOCKS : 0); unit < UNITS;
       unit += RINGS * C::BLOCKS) {
    const int own = unit * SHARERS + (KEEPS ? 0 : consumer);
    const int patch = min_of(own, C::PATCHES - 1);
    products.clear();
#pragma unroll 1
    for (int step = 0; step < STEPS; ++step, from.advance()) {
      const int slot = first_slot + from.slot;
      const u32 stage = ring + slot * Ring::STAGE;
      const int chunk = KEEPS ? place_of(step).k / Ring::CHUNK : 0;  // of the weights
      if constexpr (KEEPS) {
        const int last = (chunk + C::CHUNKS - 1) / C::WEIGHT_CHUNKS;
        for (int atom = chunk / C::WEIGHT_CHUNKS; atom <= last; ++atom)
          ptx::mbarrier_wait(kept_full + 8 * atom, 0);
      }
      ptx::mbarrier_wait(full + 8 * slot, from.phase);
      if (step + 1 == STEPS) epilogue.fetch(patch);
      const u32 image = KEEPS ? stage : stage + Ring::ATOM + consumer * Ring::IMAGE;
      products.multiply(KEEPS ? kept : stage, chunk, image);
      products.wait();
      release(slot);
    }
    if (own == patch) epilogue.finish(patch);
  }
}
#endif

}  // namespace gtco
