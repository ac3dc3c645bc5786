#include "gemm_wgmma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int ROWS = 196, COLUMNS = 256, K = 1152;
  static constexpr bool SWAP = true;
  static constexpr int BLOCK_P = 64, BLOCK_Q = 40, STAGES = 4;
  static constexpr int SPLIT = 5, MULTICAST = 1;
  static constexpr int CLUSTER_Q = 1;
  static constexpr bool P_CONSTANT = true;
  static constexpr bool Q_CONSTANT = false;
  static constexpr int REGISTERS = 128;
  static constexpr int ATOMS = 1, DEPTH = 1;
  static constexpr int WIDTH = 2;
  static constexpr int ROW_VALUES_AT = 53248, STATS_AT = 53248;
  static constexpr int INBOX_AT = 53248, BARRIERS_AT = 61440;
};

struct Windows {
  static constexpr int P = 14, Q = 14;
  static constexpr int KERNEL_H = 3, KERNEL_W = 3;
  static constexpr int STRIDE_H = 2, STRIDE_W = 2;
  static constexpr int BEFORE_H = 1, BEFORE_W = 1;
  static constexpr int DILATION_H = 1, DILATION_W = 1;
  static constexpr int CHANNELS = 128;
};

struct Epilogue {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  static constexpr int VECTOR = 8;
  static constexpr int ROW_VALUES = 0;
  static constexpr bool ROW_STATS = false;
  struct Row {  };
  template <int AT_ONCE = 0>
  __device__ __forceinline__ Row row_values(int row, bool active) const {
    return Row{};
  }
  static constexpr bool INPUTS_BY_ROW = true;
  template <int V>
  struct Inputs { Packed<half_t, V> x0; Packed<half_t, V> x1; };
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {
    return {load_packed<V>(in0 + col, active), load_packed<V>(in1 + row * 256 + col, active)};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    const auto x0 = unpack(in.x0);
    const auto v_add = map<V>([&](int i) { return (acc[i]) + (x0[i]); });
    const auto x1 = unpack(in.x1);
    const auto v_add1 = map<V>([&](int i) { return (v_add[i]) + (x1[i]); });
    const auto v_relu = map<V>([&](int i) { return math::relu((v_add1[i])); });
    store<V>(out0 + row * 256 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(256, 2)
gtco_gemm_dee064c8a4cf(const __grid_constant__ ptx::TensorMap p_map,
            const __grid_constant__ ptx::TensorMap q_map, const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0) {
  gemm_wgmma<Config, Windows>(p_map, q_map, Epilogue{in0, in1, out0});
}

