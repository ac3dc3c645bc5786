#include "squeeze.cuh"
using namespace gtco;

struct Config {
  static constexpr int PIXELS = 4, CHANNELS = 512;
  static constexpr int HIDDEN = 32, COLUMNS = 512, V = 8;
  static constexpr int THREADS = 256, SPLIT = 4;
  static constexpr int SLICE = 128, RESULTS = 128;
  static constexpr int LANES = 16;
  static constexpr bool STAGED = true;
  static constexpr int FIRST_LANES = 16, SECOND_LANES = 4;
  static constexpr int PARTS = 8, HIDDEN_LD = 32, SUMS_AT = 512, HIDDEN_AT = 1024, PARTS_AT = 1152, FIRST_AT = 5248, SECOND_AT = 13440, BARRIER_AT = 21632;
};

struct Image {  // (2:2048, 4:512, 512:1)
  const half_t* base;
  __device__ __forceinline__ const half_t* at(int image, int pixel, int channel) const {
    return base + image * 2048 + pixel * 512 + channel;
  }
};

struct First {  // (32:512, 512:1)
  using Element = half_t;
  static constexpr int VECTOR = 8;
  const half_t* base;
  __device__ __forceinline__ const half_t* at(int column, int k) const {
    return base + column * 512 + k;
  }
};

struct Second {  // (512:32, 32:1)
  using Element = half_t;
  static constexpr int VECTOR = 8;
  const half_t* base;
  __device__ __forceinline__ const half_t* at(int column, int k) const {
    return base + column * 32 + k;
  }
};

struct OfMean {
  const half_t* in0;
  const half_t* __restrict__ in1;
  const half_t* __restrict__ in2;
  const half_t* __restrict__ in3;
  const half_t* __restrict__ in4;
  half_t* __restrict__ out0;
  static constexpr int VECTOR = 1;
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
  __device__ __forceinline__ auto operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    return acc;
  }
};

struct OfHidden {
  const half_t* in0;
  const half_t* __restrict__ in1;
  const half_t* __restrict__ in2;
  const half_t* __restrict__ in3;
  const half_t* __restrict__ in4;
  half_t* __restrict__ out0;
  static constexpr int VECTOR = 1;
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
    return {load_packed<V>(in3 + col, active)};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ auto operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    const auto x0 = unpack(in.x0);
    const auto v_linear = map<V>([&](int i) { return acc[i] + x0[i]; });
    const auto v_sigmoid = map<V>([&](int i) { return math::sigmoid((v_linear[i])); });
    const auto v_mul = map<V>([&](int i) { return (v_linear[i]) * (v_sigmoid[i]); });
    return v_mul;
  }
};

struct OfResult {
  const half_t* in0;
  const half_t* __restrict__ in1;
  const half_t* __restrict__ in2;
  const half_t* __restrict__ in3;
  const half_t* __restrict__ in4;
  half_t* __restrict__ out0;
  static constexpr int VECTOR = 1;
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
    return {load_packed<V>(in4 + col, active)};
  }
  template <int V, class Stats = StatsOfLanes>
  __device__ __forceinline__ void operator()(int row, int col, const Row& r, bool active,
                                             const Inputs<V>& in,
                                             const Vec<float, V>& acc,
                                             Stats stats = {}) const {
    const auto x0 = unpack(in.x0);
    const auto v_linear = map<V>([&](int i) { return acc[i] + x0[i]; });
    const auto v_sigmoid = map<V>([&](int i) { return math::sigmoid((v_linear[i])); });
    store<V>(out0 + row * 512 + col, v_sigmoid, active);
  }
};

extern "C" __global__ void __launch_bounds__(256) gtco_squeeze_34aefb9b8a11(const half_t* in0, const half_t* __restrict__ in1, const half_t* __restrict__ in2, const half_t* __restrict__ in3, const half_t* __restrict__ in4, half_t* __restrict__ out0) {
  squeeze<Config>(Image{in0}, First{in1}, Second{in2}, OfMean{in0, in1, in2, in3, in4, out0}, OfHidden{in0, in1, in2, in3, in4, out0}, OfResult{in0, in1, in2, in3, in4, out0});
}

