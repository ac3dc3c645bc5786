#include "conv_wgmma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int N = 96, BLOCK_N = 64;
  static constexpr int TILE_T = 1, TILE_H = 8;
  static constexpr int TILE_W = 8, PATCHES = 49;
  static constexpr int BLOCKS = 49;
  static constexpr bool KEEPS_WEIGHTS = true;
  static constexpr int CHUNKS = 8, STAGES = 1;
  static constexpr int WARPS_M = 4, WARPS_N = 1;
  static constexpr int WIDTH = 8;
};

struct A {  // %in2, (1:0, 56:3584, 56:64, 64:1)
  static constexpr int P = 56, Q = 56;
  static constexpr int KERNEL_H = 3, KERNEL_W = 3;
  static constexpr int STRIDE_H = 1, STRIDE_W = 1;
  static constexpr int BEFORE_H = 1, BEFORE_W = 1;
  static constexpr int DILATION_H = 1, DILATION_W = 1;
  static constexpr int CHANNELS = 64;
  static constexpr int SIZE_H = 56, SIZE_W = 56;
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = false;
  static constexpr int VECTOR = 8;
  static constexpr bool APART = true;
  static constexpr bool SHARES_SECTORS = false;
  __device__ __forceinline__ static int place(const Pixel& at) { return at.y * 3584 + at.x * 64 + at.channel; }
  __device__ __forceinline__ const Config::Element* pixel(const Pixel& at) const {
    return base + place(at);
  }
  __device__ __forceinline__ const Config::Element* at(int, int row, int k, bool& valid) const {
    auto at = pixel_of<A>(row, k);
    valid = valid && is_inside<A>(at);
    return pixel(at);
  }
};

struct B {  // %in3, (1:0, 96:576, 576:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = true;
  static constexpr int VECTOR = 8;
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + row * 576 + k;
  }
};

struct Epilogue {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  const half_t* in2;
  const half_t* __restrict__ in3;
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

extern "C" __global__ void __launch_bounds__(128)
ENTRY_POINT(const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0, const half_t* in2, const half_t* __restrict__ in3) {
  conv_wgmma<Config>(A{in2},
                     B{in3}, Epilogue{in0, in1, out0, in2, in3});
}

