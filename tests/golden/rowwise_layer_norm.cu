#include "rowwise.cuh"
using namespace gtco;

struct Config {
  static constexpr int ROWS = 197, COLUMNS = 768;
  static constexpr int V = 8;
  static constexpr int LANES = 32, WARPS_PER_ROW = 2;
  static constexpr int ROW_WARPS = 1;
  static constexpr bool ROWS_FIRST = false;
};

struct Body {
  const half_t* in0;
  const half_t* in1;
  const half_t* in2;
  const half_t* in3;
  half_t* __restrict__ out0;
  half_t* __restrict__ out1;
  template <class Tile>
  __device__ __forceinline__ void operator()(Tile& tile) const {
    constexpr int V = Tile::V, N = Tile::N;
    const int row = tile.row();
    const bool active = tile.active();
    const auto x0 = tile.vectors([&](int row, int col, bool active) { return load<V>(in0 + row * 768 + col, active); });
    const auto x1 = tile.vectors([&](int row, int col, bool active) { return load<V>(in1 + row * 768 + col, active); });
    const auto v_add = map<N>([&](int i) { return (x0[i]) + (x1[i]); });
    const auto x2 = tile.vectors([&](int row, int col, bool active) { return load<V>(in2 + col, active); });
    const auto x3 = tile.vectors([&](int row, int col, bool active) { return load<V>(in3 + col, active); });
    const auto v_layer_norm_unit = tile.normalize(v_add, 1e-06f);
    const auto v_layer_norm = map<N>([&](int i) { return v_layer_norm_unit[i] * x2[i] + x3[i]; });
    tile.store(v_add, [&](int row, int col, bool active, const auto& x) { store<V>(out0 + row * 768 + col, x, active); });
    tile.store(v_layer_norm, [&](int row, int col, bool active, const auto& x) { store<V>(out1 + row * 768 + col, x, active); });
  }
};

extern "C" __global__ void __launch_bounds__(64) ENTRY_POINT(const half_t* in0, const half_t* in1, const half_t* in2, const half_t* in3, half_t* __restrict__ out0, half_t* __restrict__ out1) {
  rowwise<Config>(Body{in0, in1, in2, in3, out0, out1});
}

