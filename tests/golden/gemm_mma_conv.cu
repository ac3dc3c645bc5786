#include "gemm_mma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int M = 20, N = 16, K = 27;
  static constexpr int BLOCK_M = 32, BLOCK_N = 32, BLOCK_K = 32;
  static constexpr int WARPS_M = 2, WARPS_N = 2, STAGES = 4;
  static constexpr int STAGE_LD = 40, ROW_VALUES_AT = 5120;
};

struct A {  // %in2, (1:0, 8:27, 9:3, 3:1)
  static constexpr int P = 4, Q = 5;
  static constexpr int KERNEL_H = 3, KERNEL_W = 3;
  static constexpr int STRIDE_H = 2, STRIDE_W = 2;
  static constexpr int BEFORE_H = 1, BEFORE_W = 1;
  static constexpr int DILATION_H = 1, DILATION_W = 1;
  static constexpr int CHANNELS = 3;
  static constexpr int SIZE_H = 8, SIZE_W = 9;
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = false;
  static constexpr int VECTOR = 1;
  static constexpr bool APART = true;
  static constexpr bool SHARES_SECTORS = true;
  __device__ __forceinline__ static int place(const Pixel& at) { return at.y * 27 + at.x * 3 + at.channel; }
  __device__ __forceinline__ const Config::Element* pixel(const Pixel& at) const {
    return base + place(at);
  }
  __device__ __forceinline__ const Config::Element* at(int, int row, int k, bool& valid) const {
    auto at = pixel_of<A>(row, k);
    valid = valid && is_inside<A>(at);
    return pixel(at);
  }
};

struct B {  // %in3, (1:0, 16:27, 27:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = true;
  static constexpr int VECTOR = 1;
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + row * 27 + k;
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
    return {load_packed<V>(in0 + col, active), load_packed<V>(in1 + row * 16 + col, active)};
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
    store<V>(out0 + row * 16 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(128)
gtco_gemm_c539e5ea2627(const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0, const half_t* in2, const half_t* __restrict__ in3) {
  gemm_mma<Config>(A{in2},
                   B{in3}, Epilogue{in0, in1, out0, in2, in3});
}

