#include "gemm_mma.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int M = 70, N = 72, K = 168;
  static constexpr int BLOCK_M = 16, BLOCK_N = 64, BLOCK_K = 64;
  static constexpr int WARPS_M = 1, WARPS_N = 4, STAGES = 4;
  static constexpr int STAGE_LD = 72, ROW_VALUES_AT = 30720;
};

struct A {  // %in2, in3, in4, the first (1:0, 70:64, 64:1)
  const Config::Element* base;
  const Config::Element* base1;
  const Config::Element* base2;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = false;
  static constexpr int VECTOR = 8, PIECES = 3;
  static constexpr bool APART = true;
  struct Piece {
    const Config::Element* base;  // of a channel
    int pitch;
  };
  __device__ __forceinline__ Piece piece_of(int channel) const {
    if (channel < 64) return {base + channel, 64};
    if (channel < 160) return {base1 + (channel - 64), 96};
    return {base2 + (channel - 160), 8};
  }
  __device__ __forceinline__ static int row_place(int, int row) { return row; }
  __device__ __forceinline__ static int k_place(int) { return 0; }
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    const auto piece = piece_of(k);
    return piece.base + row * piece.pitch;
  }
};

struct B {  // %in5, (1:0, 72:168, 168:1)
  const Config::Element* base;
  static constexpr bool K_MAJOR = true;
  static constexpr bool CONSTANT = true;
  static constexpr int VECTOR = 8;
  __device__ __forceinline__ const Config::Element* at(int batch, int row, int k) const {
    return base + row * 168 + k;
  }
};

struct Epilogue {
  const half_t* __restrict__ in0;
  const half_t* in1;
  half_t* __restrict__ out0;
  const half_t* in2;
  const half_t* in3;
  const half_t* in4;
  const half_t* __restrict__ in5;
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
    return {load_packed<V>(in0 + col, active), load_packed<V>(in1 + row * 72 + col, active)};
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
    store<V>(out0 + row * 72 + col, v_relu, active);
  }
};

extern "C" __global__ void __launch_bounds__(128)
gtco_gemm_ea098a6f6f2b(const half_t* __restrict__ in0, const half_t* in1, half_t* __restrict__ out0, const half_t* in2, const half_t* in3, const half_t* in4, const half_t* __restrict__ in5) {
  gemm_mma<Config>(A{in2, in3, in4},
                   B{in5}, Epilogue{in0, in1, out0, in2, in3, in4, in5});
}

