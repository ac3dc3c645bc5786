#include "conv_mma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int N = 32, BLOCK_N = 32;
  static constexpr int TILE_T = 4, TILE_H = 8;
  static constexpr int TILE_W = 8, PATCHES = 256;
  static constexpr int BLOCKS = 86;
  static constexpr bool KEEPS_WEIGHTS = true;
  static constexpr int CHUNKS = 4, STAGES = 2;
  static constexpr int WARPS_M = 4;
  static constexpr int WARPS_N = 1;
  static constexpr int WIDTH = 8;
};

struct A {  // %in0, (1:0, 16:131072, 64:2048, 64:32, 32:1)
  static constexpr int O = 16, P = 64, Q = 64;
  static constexpr int KERNEL_T = 3, KERNEL_H = 3, KERNEL_W = 3;
  static constexpr int STRIDE_T = 1, STRIDE_H = 1, STRIDE_W = 1;
  static constexpr int BEFORE_T = 1, BEFORE_H = 1, BEFORE_W = 1;
  static constexpr int DILATION_T = 1, DILATION_H = 1, DILATION_W = 1;
  static constexpr int CHANNELS = 32;
  static constexpr int SIZE_T = 16, SIZE_H = 64, SIZE_W = 64;
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = false;
  static constexpr int VECTOR = 8;
  static constexpr bool APART = true;
  static constexpr bool SHARES_SECTORS = false;
  __device__ __forceinline__ static int place(const Pixel& at) { return at.z * 131072 + at.y * 2048 + at.x * 32 + at.channel; }
  __device__ __forceinline__ const Config::Element* pixel(const Pixel& at) const {
    return base + place(at);
  }
  __device__ __forceinline__ const Config::Element* at(int, int row, int k, bool& valid) const {
    auto at = pixel_of<A>(row, k);
    valid = valid && is_inside<A>(at);
    return pixel(at);
  }
};

struct B {  // %in1, (1:0, 32:864, 864:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = true;
  static constexpr int VECTOR = 8;
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + row * 864 + k;
  }
};

struct Epilogue {
  const half_t* in0;
  const half_t* __restrict__ in1;
  const half_t* __restrict__ in2;
  const half_t* in3;
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
    return {load_packed<V>(in2 + col, active), load_packed<V>(in3 + row * 32 + col, active)};
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
    store<V>(out0 + row * 32 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(128)
ENTRY_POINT(const half_t* in0, const half_t* __restrict__ in1, const half_t* __restrict__ in2, const half_t* in3, half_t* __restrict__ out0) {
  conv_mma<Config>(A{in0}, B{in1}, Epilogue{in0, in1, in2, in3, out0});
}

