#include "conv_wgmma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int N = 96, BLOCK_N = 64;
  static constexpr int TILE_T = 1, TILE_H = 4;
  static constexpr int TILE_W = 16, PATCHES = 56;
  static constexpr int BLOCKS = 56;
  static constexpr bool KEEPS_WEIGHTS = true;
  static constexpr int CHUNKS = 8, STAGES = 2;
  static constexpr int WEIGHT_CHUNKS = 8, ATOMS = 1;
  static constexpr int CONSUMERS = 1;
  static constexpr int WIDTH = 8, BARRIERS_AT = 102400;
  static constexpr bool B_CONSTANT = true;
};

struct Windows {
  static constexpr int P = 56, Q = 56;
  static constexpr int KERNEL_H = 3, KERNEL_W = 3;
  static constexpr int STRIDE_H = 1, STRIDE_W = 1;
  static constexpr int BEFORE_H = 1, BEFORE_W = 1;
  static constexpr int DILATION_H = 1, DILATION_W = 1;
  static constexpr int CHANNELS = 64;
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
    return {load_packed<V>(in0 + col, active), load_packed<V>(in1 + row * 96 + col, active)};
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
    store<V>(out0 + row * 96 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(256)
ENTRY_POINT(const __grid_constant__ ptx::TensorMap image_map,
            const __grid_constant__ ptx::TensorMap weights_map, const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0) {
  conv_wgmma<Config, Windows>(image_map, weights_map, Epilogue{in0, in1, out0});
}

