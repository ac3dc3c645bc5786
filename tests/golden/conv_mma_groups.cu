#include "conv_mma.cuh"
using namespace gtco;

struct Config {
  using Element = float;
  static constexpr int N = 48, BLOCK_N = 32;
  static constexpr int TILE_T = 1, TILE_H = 8;
  static constexpr int TILE_W = 8, PATCHES = 4;
  static constexpr int BLOCKS = 4;
  static constexpr bool KEEPS_WEIGHTS = true;
  static constexpr int CHUNKS = 8, STAGES = 2;
  static constexpr int WARPS_M = 2;
  static constexpr int WARPS_N = 1;
  static constexpr int WIDTH = 8;
  static constexpr bool EXACT = true;  // three products of tf32 each
  static constexpr bool GROUPED = true;  // the batch lies side by side
};

struct A {  // %in0, (1:0, 28:2688, 28:96, 96:1)
  static constexpr int P = 14, Q = 14;
  static constexpr int KERNEL_H = 3, KERNEL_W = 3;
  static constexpr int STRIDE_H = 2, STRIDE_W = 2;
  static constexpr int BEFORE_H = 1, BEFORE_W = 1;
  static constexpr int DILATION_H = 1, DILATION_W = 1;
  static constexpr int CHANNELS = 32;
  static constexpr int SIZE_H = 28, SIZE_W = 28;
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = false;
  static constexpr int VECTOR = 4;
  static constexpr bool APART = true;
  static constexpr bool SHARES_SECTORS = false;
  __device__ __forceinline__ static int place(const Pixel& at) { return at.y * 2688 + at.x * 96 + at.channel; }
  __device__ __forceinline__ const Config::Element* pixel(const Pixel& at) const {
    return base + place(at);
  }
  __device__ __forceinline__ const Config::Element* at(int group, int row, int k, bool& valid) const {
    auto at = pixel_of<A>(row, k);
    at.channel += group * CHANNELS;
    valid = valid && is_inside<A>(at);
    return pixel(at);
  }
};

struct B {  // %in1, (3:13824, 48:288, 288:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = true;
  static constexpr int VECTOR = 4;
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + batch * 13824 + row * 288 + k;
  }
};

struct Epilogue {
  const float* in0;
  const float* __restrict__ in1;
  const float* __restrict__ in2;
  const float* in3;
  float* __restrict__ out0;
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
  struct Inputs { Packed<float, V> x0; Packed<float, V> x1; };
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {
    return {load_packed<V>(in2 + col, active), load_packed<V>(in3 + row * 144 + col, active)};
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
    store<V>(out0 + row * 144 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(64)
ENTRY_POINT(const float* in0, const float* __restrict__ in1, const float* __restrict__ in2, const float* in3, float* __restrict__ out0) {
  conv_mma<Config>(A{in0}, B{in1}, Epilogue{in0, in1, in2, in3, out0});
}

