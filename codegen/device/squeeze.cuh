// Squeeze-and-excitation: the mean of an image's pixels, two linears of it, and what is computed
// from each of the three. An image is a block's, or SPLIT blocks' of a cluster, which share its
// channels: each multiplies its slice of the mean, all get all sums of the first linear from each
// other, and each computes a slice of the result. All sums are in a fixed order.
//
// Config: PIXELS, CHANNELS, HIDDEN (columns of the first linear), COLUMNS (of the second), V
// (channels of one load), THREADS, SPLIT, STAGED, SLICE (channels of a block), RESULTS (its columns
// of the second linear), LANES (threads that share a pixel), FIRST_LANES and SECOND_LANES (a row of
// the weights), PARTS (sums of a channel, one after another), HIDDEN_LD (HIDDEN, even), SUMS_AT,
// HIDDEN_AT, PARTS_AT, FIRST_AT and SECOND_AT (of staged weights) and BARRIER_AT (bytes). Image has
// `at(image, pixel, channel)`; First and Second, the weights, have Element, VECTOR (neighbours
// along K of one load) and `at(column, k)`. OfMean, OfHidden and OfResult compute: the first two
// return a value, the last one stores.
#pragma once

#include "epilogue.cuh"
#include "order.cuh"

namespace gtco {

// Weights in shared memory, in rows of K.
template <class Weights, int K>
struct StagedWeights {
  using Element = typename Weights::Element;
  static constexpr int VECTOR = Weights::VECTOR;
  Element* base;

  __device__ __forceinline__ Element* at(int row, int k) const { return base + row * K + k; }
};

// Asks for rows row0 and on of `weights`, from column k0 on: `count` of the ROWS and `valid` of the
// K columns are there, the others are zeros.
template <int ROWS, int K, int THREADS, class Weights>
__device__ __forceinline__ void stage_weights(const Weights& weights,
                                              const StagedWeights<Weights, K>& to, int row0,
                                              int count, int k0, int valid) {
  constexpr int V = Weights::VECTOR, VECTORS = K / V;
  static_assert(K % V == 0, "a copy does not cross a row's end");
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * VECTORS; i += THREADS) {
    const int row = i / VECTORS, k = i % VECTORS * V;
    const bool there = row < count && k < valid;
    ptx::cp_async<V * sizeof(typename Weights::Element)>(
        ptx::shared_address(to.at(row, k)), there ? weights.at(row0 + row, k0 + k) : weights.base,
        there);
  }
}

// to[i] = the product of `from` and row row0 + i of the weights from column k0 on, for `count` rows
// of at most ROWS; `valid` of the K columns are there. LANES threads share a row. Called by all.
template <int ROWS, int K, int THREADS, int LANES, class Weights>
__device__ __forceinline__ void squeeze_products(const Weights& weights, const float* from,
                                                 float* to, int row0, int count, int k0,
                                                 int valid) {
  constexpr int V = Weights::VECTOR, AT_ONCE = THREADS / LANES;
  static_assert(K % V == 0, "a load does not cross a row's end");
  const int lane = threadIdx.x % LANES, own = threadIdx.x / LANES;
#pragma unroll 4
  for (int first = 0; first < ROWS; first += AT_ONCE) {
    const int row = first + own;
    float sum = 0.0f;
#pragma unroll 4
    for (int begin = 0; begin < K; begin += LANES * V) {
      const int k = begin + lane * V;
      const bool there = row < count && k < valid;
      // Not behind a condition: loads in branches of their own wait for each other.
      const auto weight = load<V>(there ? weights.at(row0 + row, k0 + k) : weights.base);
      const auto x = load<V>(from + (there ? k : 0));
#pragma unroll
      for (int i = 0; i < V; ++i) sum = there ? fmaf(x[i], weight[i], sum) : sum;
    }
    sum = lanes_sum<LANES>(sum);
    if (lane == 0 && row < count) to[row] = sum;
  }
}

template <class Functor>
__device__ __forceinline__ auto squeeze_value(const Functor& functor, int row, int col, float x) {
  const auto inputs = functor.template inputs<1>(row, col, true);
  return functor.template operator()<1>(row, col, {}, true, inputs, Vec<float, 1>{{x}});
}

template <class C, class Image, class First, class Second, class OfMean, class OfHidden,
          class OfResult>
__device__ __forceinline__ void squeeze(const Image& image, const First& first_weights,
                                        const Second& second_weights, const OfMean& of_mean,
                                        const OfHidden& of_hidden, const OfResult& of_result) {
  constexpr int V = C::V, SLICE = C::SLICE, VECTORS = SLICE / V, UNROLL = 8;
  constexpr int LANES = C::LANES, GROUPS = C::THREADS / LANES;
  static_assert(C::CHANNELS % V == 0, "a load does not cross a pixel's end");

  extern __shared__ __align__(1024) unsigned char smem[];
  float* means = reinterpret_cast<float*>(smem);                  // (SLICE)
  float* sums = reinterpret_cast<float*>(smem + C::SUMS_AT);      // (SPLIT, HIDDEN_LD)
  float* hidden = reinterpret_cast<float*>(smem + C::HIDDEN_AT);  // (HIDDEN_LD)
  float* parts = reinterpret_cast<float*>(smem + C::PARTS_AT);    // (PARTS, SLICE)
  float* results = parts;                                         // (RESULTS), when those are read

  const int thread = threadIdx.x, rank = blockIdx.x % C::SPLIT;
  const int n = in_order<C::SPLIT>(blockIdx.x, gridDim.x) / C::SPLIT;
  const int channel0 = rank * SLICE, channels = min_of(SLICE, C::CHANNELS - channel0);

  ptx::griddepcontrol_launch_dependents();
#if __CUDA_ARCH__ >= 900
  const u32 sums_full = ptx::shared_address(smem + C::BARRIER_AT);
  if constexpr (C::SPLIT > 1) {
    if (thread == 0) {
      ptx::mbarrier_init(sums_full, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(sums_full, (C::SPLIT - 1) * C::HIDDEN_LD * 4);
    }
    __syncwarp();
    ptx::barrier_cluster_arrive_relaxed();
  }
#endif
  const int col0 = rank * C::RESULTS, columns = min_of(C::RESULTS, C::COLUMNS - col0);
  using FirstStaged = StagedWeights<First, SLICE>;
  using SecondStaged = StagedWeights<Second, C::HIDDEN>;
  const FirstStaged first{reinterpret_cast<typename First::Element*>(smem + C::FIRST_AT)};
  const SecondStaged second{reinterpret_cast<typename Second::Element*>(smem + C::SECOND_AT)};
  if constexpr (C::STAGED) {
    stage_weights<C::HIDDEN, SLICE, C::THREADS>(first_weights, first, 0, C::HIDDEN, channel0,
                                                channels);
    stage_weights<C::RESULTS, C::HIDDEN, C::THREADS>(second_weights, second, col0, columns, 0,
                                                     C::HIDDEN);
    ptx::cp_async_commit();
  }
  ptx::griddepcontrol_wait();

  const int lane = thread % LANES, group = thread / LANES;
#pragma unroll 1
  for (int begin = 0; begin < VECTORS; begin += LANES) {
    const int channel = (begin + lane) * V;
    const bool on = group < GROUPS && channel < channels;
    Vec<float, V> sum{};
#pragma unroll 1
    for (int pixel0 = group; pixel0 < C::PIXELS; pixel0 += GROUPS * UNROLL) {
      decltype(load_packed<V>(image.base)) pixels[UNROLL];
      bool there[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const int pixel = pixel0 + u * GROUPS;
        there[u] = on && pixel < C::PIXELS;
        pixels[u] = load_packed<V>(there[u] ? image.at(n, pixel, channel0 + channel) : image.base);
      }
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) {
        const auto x = unpack<V>(pixels[u]);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += there[u] ? x[i] : 0.0f;
      }
    }
    if constexpr (LANES < 32) {
#pragma unroll
      for (int offset = LANES; offset < 32; offset *= 2)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
    }
    const int part = LANES < 32 ? thread / 32 : group;
    const bool leads = LANES < 32 ? thread % 32 < LANES : group < GROUPS;
    if (leads && channel < SLICE) store<V>(parts + part * SLICE + channel, sum);
  }
  __syncthreads();
  for (int i = thread; i < SLICE; i += C::THREADS) {
    float sum = 0.0f;
#pragma unroll 8
    for (int part = 0; part < C::PARTS; ++part) sum += parts[part * SLICE + i];
    float value = 0.0f;
    if (i < channels) value = squeeze_value(of_mean, n, channel0 + i, sum / C::PIXELS)[0];
    means[i] = value;
  }
  if constexpr (C::STAGED) ptx::cp_async_wait<0>();
  __syncthreads();

  float* mine = sums + rank * C::HIDDEN_LD;
  if constexpr (C::STAGED)
    squeeze_products<C::HIDDEN, SLICE, C::THREADS, C::FIRST_LANES>(first, means, mine, 0, C::HIDDEN,
                                                                   0, channels);
  else
    squeeze_products<C::HIDDEN, SLICE, C::THREADS, C::FIRST_LANES>(first_weights, means, mine, 0,
                                                                   C::HIDDEN, channel0, channels);
  if (C::HIDDEN % 2 != 0 && thread == 0) mine[C::HIDDEN] = 0.0f;
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if constexpr (C::SPLIT > 1) {
    constexpr int PAIRS = C::HIDDEN_LD / 2;
    ptx::barrier_cluster_wait();  // the others can take sums
#pragma unroll 1
    for (int i = thread; i < (C::SPLIT - 1) * PAIRS; i += C::THREADS) {
      const int peer = (rank + 1 + i / PAIRS) % C::SPLIT;
      const float* from = mine + i % PAIRS * 2;
      ptx::st_async(ptx::mapa(ptx::shared_address(from), peer), from[0], from[1],
                    ptx::mapa(sums_full, peer));
    }
    ptx::mbarrier_wait(sums_full, 0);
  }
#endif
  for (int i = thread; i < C::HIDDEN; i += C::THREADS) {
    float sum = sums[i];
#pragma unroll
    for (int part = 1; part < C::SPLIT; ++part) sum += sums[part * C::HIDDEN_LD + i];
    hidden[i] = squeeze_value(of_hidden, n, i, sum)[0];
  }
  __syncthreads();

  if constexpr (C::STAGED)
    squeeze_products<C::RESULTS, C::HIDDEN, C::THREADS, C::SECOND_LANES>(second, hidden, results, 0,
                                                                         columns, 0, C::HIDDEN);
  else
    squeeze_products<C::RESULTS, C::HIDDEN, C::THREADS, C::SECOND_LANES>(
        second_weights, hidden, results, col0, columns, 0, C::HIDDEN);
  __syncthreads();
  for (int i = thread; i < columns; i += C::THREADS)
    squeeze_value(of_result, n, col0 + i, results[i]);
}

}  // namespace gtco
