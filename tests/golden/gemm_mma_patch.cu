#include "gemm_mma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int M = 196, N = 768, K = 768;
  static constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 64;
  static constexpr int WARPS_M = 2, WARPS_N = 2, STAGES = 4;
  static constexpr int STAGE_LD = 72, ROW_VALUES_AT = 65536;
};

struct A {  // %in1, (1:0, 14:3584x14:16, 3:50176x16:224x16:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = false;
  static constexpr int VECTOR = 8;
  static constexpr bool APART = true;
  __device__ __forceinline__ static int row_place(int batch, int row) { return (row / 14) * 3584 + (row % 14) * 16; }
  __device__ __forceinline__ static int k_place(int k) { return (k / 256) * 50176 + ((k / 16) % 16) * 224 + (k % 16); }
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + row_place(batch, row) + k_place(k);
  }
};

struct B {  // %in2, (1:0, 768:768, 768:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = true;
  static constexpr int VECTOR = 8;
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + row * 768 + k;
  }
};

struct Epilogue {
  const half_t* __restrict__ in0;
  half_t* __restrict__ out0;
  const half_t* in1;
  const half_t* __restrict__ in2;
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
    return {load_packed<V>(in0 + col, active)};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    const auto x0 = unpack(in.x0);
    const auto v_linear = map<V>([&](int i) { return acc[i] + x0[i]; });
    store<V>(out0 + row * 768 + col, v_linear, active);
  }
};

extern "C" __global__ void __launch_bounds__(128)
ENTRY_POINT(const half_t* __restrict__ in0, half_t* __restrict__ out0, const half_t* in1, const half_t* __restrict__ in2) {
  gemm_mma<Config>(A{in1},
                   B{in2}, Epilogue{in0, out0, in1, in2});
}

