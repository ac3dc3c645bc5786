#include "gemm_wgmma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int ROWS = 197, COLUMNS = 3072, K = 768;
  static constexpr bool SWAP = false;
  static constexpr int BLOCK_P = 64, BLOCK_Q = 96, STAGES = 4;
  static constexpr int SPLIT = 1, MULTICAST = 4;
  static constexpr bool P_CONSTANT = false;
  static constexpr bool Q_CONSTANT = true;
  static constexpr bool EARLY_TRIGGER = false;
  static constexpr bool PREFETCH = false;
  static constexpr int STAGE_LD = 104;
  static constexpr int ROW_VALUES_AT = 81920, BARRIERS_AT = 82432;
};

struct Epilogue {
  const float* in0;
  const float* __restrict__ in1;
  const float* __restrict__ in2;
  half_t* __restrict__ out0;
  static constexpr int VECTOR = 8;
  static constexpr int ROW_VALUES = 2;
  struct Row { float v_merge_stats_0; float v_merge_stats_1; };
  __device__ __forceinline__ Row row_values(int row, bool active) const {
    const RowMoments v_merge_stats = merge_row_stats<768>(in0 + row * 24, 1e-06f);
    const float v_merge_stats_0 = v_merge_stats.mean;
    const float v_merge_stats_1 = v_merge_stats.rstd;
    return Row{v_merge_stats_0, v_merge_stats_1};
  }
  __device__ __forceinline__ void prefetch(int col) const {
    ptx::prefetch_l1(in1 + col);
    ptx::prefetch_l1(in2 + col);
  }
  template <int V>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Vec<float, V>& acc) const {
    const auto x0 = load<V>(in1 + col, active);
    const auto v_mul = map<V>([&](int i) { return (r.v_merge_stats_0) * (x0[i]); });
    const auto v_sub = map<V>([&](int i) { return (acc[i]) - (v_mul[i]); });
    const auto v_mul1 = map<V>([&](int i) { return (v_sub[i]) * (r.v_merge_stats_1); });
    const auto x1 = load<V>(in2 + col, active);
    const auto v_add = map<V>([&](int i) { return (v_mul1[i]) + (x1[i]); });
    const auto v_gelu = map<V>([&](int i) { return math::gelu_none((v_add[i])); });
    const auto v_cast = map<V>([&](int i) { return v_gelu[i]; });
    store<V>(out0 + row * 3072 + col, v_cast, active);
  }
};

extern "C" __global__ void __launch_bounds__(256, 1)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap p_map,
            const __grid_constant__ ptx::TensorMap q_map, const float* in0, const float* __restrict__ in1, const float* __restrict__ in2, half_t* __restrict__ out0) {
  gemm_wgmma<Config>(p_map, q_map, Epilogue{in0, in1, in2, out0});
}

