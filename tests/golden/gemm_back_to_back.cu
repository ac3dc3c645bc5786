#include "gemm_back_to_back.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int ROWS = 16896, K = 64;
  static constexpr int MIDDLE = 256, COLUMNS = 64;
  static constexpr int BLOCK_N = 64, BLOCKS = 132;
  static constexpr int A_TILES = 2, STAGES = 4;
  static constexpr int SQUARES = 4, WIDTH = 8;
  static constexpr int RING_AT = 32768, SQUARES_AT = 98304;
  static constexpr int ROW_VALUES_AT = 163840, BARRIERS_AT = 163840;
};

struct First {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  const half_t* __restrict__ in2;
  half_t* __restrict__ out1;
  static constexpr int VECTOR = 2;
  static constexpr int ROW_VALUES = 0;
  static constexpr bool ROW_STATS = false;
  struct Row {  };
  template <int AT_ONCE = 0>
  __device__ __forceinline__ Row row_values(int row, bool active) const {
    return Row{};
  }
  static constexpr bool INPUTS_BY_ROW = false;
  template <int V>
  struct Inputs { Packed<half_t, V> x0; };
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {
    return {load_packed<V>(in0 + col, active)};
  }
  template <int V, class Stats, class Copied>
  __device__ __forceinline__ auto operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats, const Copied& copied) const {
    const auto x0 = unpack(in.x0);
    const auto v_linear = map<V>([&](int i) { return acc[i] + x0[i]; });
    const auto x1 = unpack(copied.template load<V>(row, col));
    const auto v_add = map<V>([&](int i) { return (v_linear[i]) + (x1[i]); });
    const auto v_relu = map<V>([&](int i) { return math::relu((v_add[i])); });
    return v_relu;
  }
};

struct Store {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  const half_t* __restrict__ in2;
  half_t* __restrict__ out1;
  static constexpr int VECTOR = 8;
  static constexpr int ROW_VALUES = 0;
  static constexpr bool ROW_STATS = false;
  struct Row {  };
  template <int AT_ONCE = 0>
  __device__ __forceinline__ Row row_values(int row, bool active) const {
    return Row{};
  }
  static constexpr bool INPUTS_BY_ROW = false;
  template <int V>
  struct Inputs { };
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {
    return {};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    store<V>(out0 + row * 256 + col, acc, active);
  }
};

struct Second {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  const half_t* __restrict__ in2;
  half_t* __restrict__ out1;
  static constexpr int VECTOR = 8;
  static constexpr int ROW_VALUES = 0;
  static constexpr bool ROW_STATS = false;
  struct Row {  };
  template <int AT_ONCE = 0>
  __device__ __forceinline__ Row row_values(int row, bool active) const {
    return Row{};
  }
  static constexpr bool INPUTS_BY_ROW = false;
  template <int V>
  struct Inputs { Packed<half_t, V> x0; };
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {
    return {load_packed<V>(in2 + col, active)};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    const auto x0 = unpack(in.x0);
    const auto v_linear = map<V>([&](int i) { return acc[i] + x0[i]; });
    const auto v_relu = map<V>([&](int i) { return math::relu((v_linear[i])); });
    store<V>(out1 + row * 64 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap a_map,
            const __grid_constant__ ptx::TensorMap b_map,
            const __grid_constant__ ptx::TensorMap d_map, const __grid_constant__ ptx::TensorMap image_map, const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0, const half_t* __restrict__ in2, half_t* __restrict__ out1) {
  gemm_back_to_back<Config>(a_map, b_map, d_map, First{in0, in1, out0, in2, out1}, Store{in0, in1, out0, in2, out1}, Second{in0, in1, out0, in2, out1}, image_map);
}

