#include "gemm_wgmma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int ROWS = 197, COLUMNS = 768, K = 768;
  static constexpr bool SWAP = true;
  static constexpr int BLOCK_P = 128, BLOCK_Q = 104, STAGES = 4;
  static constexpr int SPLIT = 4, MULTICAST = 1;
  static constexpr int CLUSTER_Q = 1;
  static constexpr bool P_CONSTANT = true;
  static constexpr bool Q_CONSTANT = false;
  static constexpr int REGISTERS = 170;
  static constexpr int ATOMS = 1, DEPTH = 1;
  static constexpr int WIDTH = 2;
  static constexpr int ROW_VALUES_AT = 118784, STATS_AT = 118784;
  static constexpr int INBOX_AT = 120832, BARRIERS_AT = 169984;
};

struct Epilogue {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  float* __restrict__ out1;
  static constexpr int VECTOR = 8;
  static constexpr int ROW_VALUES = 0;
  static constexpr bool ROW_STATS = true;
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
    return {load_packed<V>(in0 + col, active), load_packed<V>(in1 + row * 768 + col, active)};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    const auto x0 = unpack(in.x0);
    const auto v_linear = map<V>([&](int i) { return acc[i] + x0[i]; });
    const auto x1 = unpack(in.x1);
    const auto v_add = map<V>([&](int i) { return (v_linear[i]) + (x1[i]); });
    store<V>(out0 + row * 768 + col, v_add, active);
    const auto stored_out1 = map<V>([&](int i) { return round_to<half_t>(v_add[i]); });
    stats.template store<768>(out1, row, col, stored_out1, active);
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap p_map,
            const __grid_constant__ ptx::TensorMap q_map, const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0, float* __restrict__ out1) {
  gemm_wgmma<Config>(p_map, q_map, Epilogue{in0, in1, out0, out1});
}

