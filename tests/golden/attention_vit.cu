#include "attention.cuh"
using namespace gtco;

struct Config {
  using Element = half_t;
  static constexpr int LQ = 197, LK = 197;
  static constexpr int D = 64, DV = 64;
  static constexpr bool CAUSAL = false;
  static constexpr float SCALE = 0.125f;
  static constexpr int BLOCK_Q = 32, BLOCK_K = 128;
  static constexpr int WARPS_K = 4, STAGES = 2;
  static constexpr int COPY_WARPS = 0;
  static constexpr int SHARES_AT = 69632, ROW_VALUES_AT = 70656;
};

struct Q {  // %in0, (12:64, 197:2304, 64:1)
  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {
    return base + head * 64 + row * 2304 + column;
  }
};
struct K {  // %in0, (12:64, 197:2304, 64:1)+768
  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {
    return base + head * 64 + row * 2304 + column + 768;
  }
};
struct V {  // %in0, (12:64, 197:2304, 64:1)+1536
  const Config::Element* base;
  __device__ __forceinline__ const Config::Element* at(int head, int row, int column) const {
    return base + head * 64 + row * 2304 + column + 1536;
  }
};

struct Epilogue {
  half_t* __restrict__ out0;
  const half_t* in0;
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
  struct Inputs { };
  template <int V>
  __device__ __forceinline__ Inputs<V> inputs(int row, int col, bool active) const {
    return {};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    store<V>(out0 + (row / 197) * 64 + (row % 197) * 768 + col, acc, active);
  }
};

extern "C" __global__ void __launch_bounds__(256)
ENTRY_POINT(half_t* __restrict__ out0, const half_t* in0) {
  attention<Config>(Q{in0}, K{in0}, V{in0}, NoMask{}, Epilogue{out0, in0});
}

