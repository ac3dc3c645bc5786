#include "attention_projection.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int LQ = 197, LK = 197;
  static constexpr int D = 64, DV = 64;
  static constexpr bool CAUSAL = false;
  static constexpr float SCALE = 0.125f;
  static constexpr int BLOCK_Q = 32, BLOCK_K = 224;
  static constexpr int WARPS_K = 7, STAGES = 1;
  static constexpr int HEADS = 12, COLUMNS = 768;
  static constexpr bool WGMMA = true;
  static constexpr int COLUMN_WARPS = 2;
  static constexpr bool W_CONSTANT = true;
  static constexpr int INBOX_AT = 98304, RING_AT = 143360;
  static constexpr int SHARES_AT = 207872, ROW_VALUES_AT = 209664;
  static constexpr int PARTS_AT = 98304, BARRIERS_AT = 209664;
};

struct Q {  // %in2, (12:64, 197:2304, 64:1)
  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {
    return base + head * 64 + row * 2304 + column;
  }
};
struct K {  // %in2, (12:64, 197:2304, 64:1)+768
  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {
    return base + head * 64 + row * 2304 + column + 768;
  }
};
struct V {  // %in2, (12:64, 197:2304, 64:1)+1536
  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {
    return base + head * 64 + row * 2304 + column + 1536;
  }
};

struct Epilogue {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  float* __restrict__ out1;
  const half_t* in2;
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

extern "C" __global__ void __launch_bounds__(448)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap weights, const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0, float* __restrict__ out1, const half_t* in2) {
  attention_projection<Config>(Q{in2}, K{in2}, V{in2}, NoMask{}, weights, Epilogue{in0, in1, out0, out1, in2});
}

