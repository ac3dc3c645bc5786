// The softmax of attention over keys that come a tile at a time, in base 2, and its masks.
//
// Config: LQ, LK, BLOCK_K, DV, CAUSAL, SCALE. Mask: PRESENT and, if so, Element and
// `at(head, query, key)`; bool elements choose keys, others are added to the scores. RUN keys in a
// row, from a multiple of RUN on, have one element. Key k has that of key k - PERIOD, if PERIOD is
// not 0. With PAIRS an even key and the next lie side by side, on a multiple of both.
#pragma once

#include "vector.cuh"

namespace gtco {

struct NoMask {
  static constexpr bool PRESENT = false;
};

// The sum of two masks, neither of bool.
template <class First, class Second>
struct MaskSum {
  static constexpr bool PRESENT = true;
  First first;
  Second second;
};

// An element of a mask in the low bits of a register, and back.
__device__ __forceinline__ u32 mask_bits(bool x) { return x; }
__device__ __forceinline__ u32 mask_bits(half_t x) { return x.bits; }
__device__ __forceinline__ u32 mask_bits(bf16_t x) { return x.bits; }
__device__ __forceinline__ u32 mask_bits(float x) { return __float_as_uint(x); }
// Two of 16 bits, side by side.
template <class T>
__device__ __forceinline__ u32 mask_pair(const T* from) {
  const Packed<T, 2> both = load_packed<2>(from);
  return mask_bits(both.data[0]) | mask_bits(both.data[1]) << 16;
}
template <class T>
__device__ __forceinline__ T mask_element(u32 bits) {
  if constexpr (is_same<T, bool>) {
    return (bits & 1) != 0;
  } else if constexpr (is_same<T, float>) {
    return __uint_as_float(bits);
  } else {
    return T{static_cast<u16>(bits)};
  }
}

// What the mask has for a warp's 16 queries and KEYS keys, in the order of their scores. It is
// asked for all at once and ahead of them: element by element, each behind its condition, 64
// queries and 197 keys took 30 us.
template <class C, class Mask, int KEYS>
struct MaskTile {
  using Element = typename Mask::Element;
  static constexpr int IN_WORD = 4 / sizeof(Element), BITS = 8 * sizeof(Element);
  // Keys of a lane's fragments that have one element; 1 of less than a fragment's.
  static constexpr int TOGETHER = Mask::RUN % KEYS == 0 ? KEYS : Mask::RUN % 8 == 0 ? 8 : 1;
  static constexpr bool TWICE = Mask::RUN % 2 == 0;  // an even key and the next have one element
  static constexpr bool PAIRS = Mask::PAIRS && IN_WORD == 2 && !TWICE;
  static constexpr bool SAME_IN_ALL = Mask::PERIOD > 0 && C::BLOCK_K % Mask::PERIOD == 0;  // tiles
  static constexpr int ELEMENTS = TOGETHER > 1 ? KEYS / TOGETHER * 2 : KEYS / 2;
  static constexpr bool ADDED = !is_same<Element, bool>;
  // Scores keep their size, so that they may be converted to base 2 before they are compared.
  static constexpr bool IN_RANGE = !ADDED || is_same<Element, half_t>;

  u32 words[ceil_div(ELEMENTS, IN_WORD)];

  __device__ __forceinline__ void load(const Mask& mask, int lane, int head, int query0, int key0,
                                       bool first) {
    if (SAME_IN_ALL && !first) return;
#pragma unroll
    for (int i = 0; i < ceil_div(ELEMENTS, IN_WORD); ++i) {
      words[i] = 0;
#pragma unroll
      for (int j = i * IN_WORD; j < min_of((i + 1) * IN_WORD, ELEMENTS); ++j) {
        // What lies beyond the last query or key does not count.
        const int half = TOGETHER > 1 ? j % 2 : j % 4 / 2;
        const int query = min_of(query0 + lane / 4 + half * 8, C::LQ - 1);
        int key = key0 + (TOGETHER > 1 ? j / 2 * TOGETHER : j / 4 * 8 + lane % 4 * 2);
        if constexpr (TOGETHER == 1 && !TWICE && !PAIRS) key += j % 2;
        if constexpr (PAIRS) {
          if (j % 2 == 0) words[i] = key < C::LK ? mask_pair(mask.at(head, query, key)) : 0;
        } else {
          const u32 bits = key < C::LK ? mask_bits(*mask.at(head, query, key)) : 0;
          words[i] |= bits << j % IN_WORD * BITS;
        }
      }
    }
  }

  // Of element j of fragment n.
  __device__ __forceinline__ compute_t<Element> at(int n, int j) const {
    const int i = TOGETHER > 1 ? n * 8 / TOGETHER * 2 + j / 2 : n * 4 + j;
    return to_compute(mask_element<Element>(words[i / IN_WORD] >> i % IN_WORD * BITS));
  }
};
template <class C, int KEYS>
struct MaskTile<C, NoMask, KEYS> {
  static constexpr bool ADDED = false, IN_RANGE = true;
};
template <class C, class First, class Second, int KEYS>
struct MaskTile<C, MaskSum<First, Second>, KEYS> {
  using Firsts = MaskTile<C, First, KEYS>;
  using Seconds = MaskTile<C, Second, KEYS>;
  static constexpr bool ADDED = true, IN_RANGE = Firsts::IN_RANGE && Seconds::IN_RANGE;

  Firsts firsts;
  Seconds seconds;

  __device__ __forceinline__ void load(const MaskSum<First, Second>& mask, int lane, int head,
                                       int query0, int key0, bool first) {
    firsts.load(mask.first, lane, head, query0, key0, first);
    seconds.load(mask.second, lane, head, query0, key0, first);
  }
  __device__ __forceinline__ float at(int n, int j) const {
    return firsts.at(n, j) + seconds.at(n, j);
  }
};

inline constexpr float LOG2E = 1.4426950408889634f;

// The online softmax of a warp's 16 queries over KEYS keys at a time. Scores, weights and results
// lie as mma.sync and wgmma number accumulators: of 8 columns, lane l has rows l / 4 and l / 4 + 8
// and columns l % 4 * 2 and the next.
template <class C, class Mask, int KEYS>
struct SoftmaxRows {
  using Masks = MaskTile<C, Mask, KEYS>;
  static constexpr int DV16 = ceil_div(C::DV, 16);
  // Where nothing is added the scores stay as they are, and exp2(UNIT * (score - top)) scales them
  // on the way; a mask adds to scaled scores. (A negative scale would turn the largest to the
  // smallest.)
  static constexpr bool SCALED_EARLY = Masks::ADDED || C::SCALE <= 0.0f;
  static constexpr float UNIT = SCALED_EARLY ? LOG2E : C::SCALE * LOG2E;

  float out[DV16 * 2][4] = {};      // (16, DV), not yet divided by `total`
  float top[2], total[2] = {0, 0};  // per row: largest score so far, sum of this lane's weights
  int lane;

  __device__ __forceinline__ SoftmaxRows() { top[0] = top[1] = -math::infinity(); }

  // Takes away what the mask, the diagonal or the last key forbids, and adds an additive mask.
  // Element j of a fragment is query j / 2 * 8 + lane / 4, key lane % 4 * 2 + j % 2.
  // Of the first FREE keys each is allowed.
  template <int FREE = 0>
  __device__ __forceinline__ void mask_scores(float (&scores)[KEYS / 8][4], const Masks& mask,
                                              int query0, int key0) const {
    const bool whole = key0 + KEYS <= C::LK && (!C::CAUSAL || key0 + KEYS - 1 <= query0);
    if constexpr (SCALED_EARLY && !Masks::ADDED) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[n][j] *= C::SCALE;
      }
    }
    if (whole && !Mask::PRESENT) return;
#pragma unroll
    for (int n = FREE / 8; n < KEYS / 8; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int query = query0 + lane / 4 + j / 2 * 8;
        const int key = key0 + n * 8 + lane % 4 * 2 + j % 2;
        const bool allowed = key < C::LK && (!C::CAUSAL || key <= query);
        if constexpr (Masks::ADDED) {
          scores[n][j] = fmaf(scores[n][j], C::SCALE, mask.at(n, j));
        } else if constexpr (Mask::PRESENT) {
          if (!mask.at(n, j)) scores[n][j] = -math::infinity();
        }
        if (!allowed) scores[n][j] = -math::infinity();
      }
    }
  }

  // Online softmax: scores become weights relative to the new largest score of each row.
  __device__ __forceinline__ void rescale(float (&scores)[KEYS / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float best = top[half];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
        best = fmaxf(best, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
      best = lanes_max<4>(best);
      // A row without a key so far: its weights are zeros, not exp(-inf + inf).
      const float base = best == -math::infinity() ? 0.0f : best;
      const float shrink = ptx::ex2((top[half] - base) * UNIT);
      top[half] = best;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int j = half * 2; j < half * 2 + 2; ++j) {
          // The least finite mask keeps a row alive that sees nothing else: times UNIT it is -inf.
          const float exponent = Masks::IN_RANGE ? fmaf(scores[n][j], UNIT, -base * UNIT)
                                                 : (scores[n][j] - base) * UNIT;
          scores[n][j] = ptx::ex2(exponent);
          sum += scores[n][j];
        }
      }
      total[half] = total[half] * shrink + sum;
#pragma unroll
      for (int n = 0; n < DV16 * 2; ++n) {
        out[n][half * 2] *= shrink;
        out[n][half * 2 + 1] *= shrink;
      }
    }
  }

  // Keys of an A fragment, which is one fragment of scores, or of 16 bits two that are neighbours.
  template <class Element>
  static constexpr int OPERAND_KEYS = 32 / sizeof(Element);

  // The weights of the k-th OPERAND_KEYS keys as an A fragment. Of floats a lane has those of keys
  // 2 t and 2 t + 1 of eight, and no weight changes its lane: the tensor core's k of t and t + 4
  // stand for them, so that it must get the values in that order.
  template <class Element>
  __device__ __forceinline__ static void to_operand(u32 (&a)[4],
                                                    const float (&weights)[KEYS / 8][4], int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Element) == 4) {
        a[i] = ptx::cvt_tf32(weights[k][i % 2 * 2 + i / 2]);
      } else {
        a[i] = ptx::cvt_pack<Element>(weights[k * 2 + i / 2][i % 2 * 2],
                                      weights[k * 2 + i / 2][i % 2 * 2 + 1]);
      }
    }
  }

  // The share of a row's results that a sum of weights takes; a query that may see no key gets
  // zeros, as in torch.
  __device__ __forceinline__ static float inverse(float sum) {
    return sum == 0.0f ? 0.0f : 1.0f / sum;
  }
};

// Where the PARTS that different warps have of each of ROWS queries come together. A part that is
// the whole is divided on its way.
template <class Softmax, int ROWS, int PARTS, int THREADS>
class PartsMerge {
 public:
  static constexpr int LD = Softmax::DV16 * 16 + 8;  // rows of a fragment meet different banks

  // (PARTS, ROWS, LD) and (2, PARTS, ROWS) floats of shared memory.
  __device__ __forceinline__ PartsMerge(float* staged, float* shares)
      : staged_(staged), shares_(shares), tops_(shares + PARTS * ROWS) {}

  // Stages the 16 rows from `row` on of a part.
  __device__ __forceinline__ void stage(const Softmax& state, int part, int row) const {
    const int lane = state.lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + lane / 4 + half * 8;
      const float share = PARTS == 1 ? Softmax::inverse(lanes_sum<4>(state.total[half])) : 1.0f;
      float* to = staged_ + (part * ROWS + r) * LD + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Softmax::DV16 * 2; ++n) {
        const float* out = state.out[n] + half * 2;
        store<2>(to + n * 8, Vec<float, 2>{{out[0] * share, out[1] * share}});
      }
      if constexpr (PARTS > 1) {
        const float total = lanes_sum<4>(state.total[half]);
        if (lane % 4 == 0) {
          shares_[part * ROWS + r] = total;
          tops_[part * ROWS + r] = state.top[half];
        }
      }
    }
  }

#if __CUDA_ARCH__ >= 900
  // Bytes that a block of a cluster gets, itself included.
  static constexpr int BYTES = PARTS * ROWS * (Softmax::DV16 * 16 + 2) * 4;

  // Sends the 16 rows from `row` on of a part to those of SPLIT blocks of the cluster that finish
  // them, of which each has the next ROWS; their `barrier`s count the bytes. Sums and largest
  // scores go behind each row.
  template <int SPLIT>
  __device__ __forceinline__ void send(const Softmax& state, int part, int row, u32 barrier) const {
    static_assert(ROWS % 8 == 0 && PARTS % SPLIT == 0, "eight rows of a fragment go to one block");
    const int lane = state.lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int owner = (row + half * 8) / ROWS, r = (row + half * 8) % ROWS + lane / 4;
      const u32 to = ptx::mapa(ptx::shared_address(staged_ + (part * ROWS + r) * LD), owner);
      const u32 counts = ptx::mapa(barrier, owner);
#pragma unroll
      for (int n = 0; n < Softmax::DV16 * 2; ++n) {
        const float* out = state.out[n] + half * 2;
        ptx::st_async(to + (n * 8 + lane % 4 * 2) * 4, out[0], out[1], counts);
      }
      const float total = lanes_sum<4>(state.total[half]);
      if (lane % 4 == 0) ptx::st_async(to + Softmax::DV16 * 16 * 4, total, state.top[half], counts);
    }
  }

  // When all of them have come. All threads.
  __device__ __forceinline__ void receive(int thread) const {
#pragma unroll 1
    for (int i = thread; i < PARTS * ROWS; i += THREADS) {
      const auto of_row = load<2>(staged_ + i * LD + Softmax::DV16 * 16);
      shares_[i] = of_row[0];
      tops_[i] = of_row[1];
    }
  }
#endif

  // When all have staged theirs: what share of the whole each part has. All threads.
  __device__ __forceinline__ void settle(int thread) const {
    __syncthreads();
    if constexpr (PARTS > 1) {
#pragma unroll 1
      for (int r = thread; r < ROWS; r += THREADS) {
        float best = tops_[r];
#pragma unroll
        for (int p = 1; p < PARTS; ++p) best = fmaxf(best, tops_[p * ROWS + r]);
        const float base = best == -math::infinity() ? 0.0f : best;
        float weights[PARTS], total = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          weights[p] = ptx::ex2((tops_[p * ROWS + r] - base) * Softmax::UNIT);
          total += shares_[p * ROWS + r] * weights[p];
        }
        const float whole = Softmax::inverse(total);
#pragma unroll
        for (int p = 0; p < PARTS; ++p) shares_[p * ROWS + r] = weights[p] * whole;
      }
      __syncthreads();
    }
  }

  // The result of row r from column c on.
  template <int VECTOR>
  __device__ __forceinline__ Vec<float, VECTOR> merged(int r, int c) const {
    if constexpr (PARTS == 1) {
      return load<VECTOR>(staged_ + r * LD + c);
    } else {
      Vec<float, VECTOR> sum{};
#pragma unroll
      for (int p = 0; p < PARTS; ++p) {
        const auto part_out = load<VECTOR>(staged_ + (p * ROWS + r) * LD + c);
        const float share = shares_[p * ROWS + r];
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum[i] += part_out[i] * share;
      }
      return sum;
    }
  }

 private:
  float *const staged_, *const shares_, *const tops_;
};

}  // namespace gtco
