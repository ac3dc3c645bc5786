#include "columnwise.cuh"
using namespace gtco;

struct Config {
  static constexpr int ROWS = 5200, COLUMNS = 54;
  static constexpr int V = 2;
  static constexpr int LENGTH = 5200, DEPTH = 1;
  static constexpr int LANES = 8, VECTORS = 8, THREADS = 512;
};

struct Body {
  const half_t* in0;
  const half_t* in1;
  const half_t* in2;
  half_t* __restrict__ out0;
  const half_t* in3;
  half_t* __restrict__ out1;
  half_t* __restrict__ out2;
  template <class Tile>
  __device__ __forceinline__ void operator()(Tile& tile) const {
    constexpr int V = Tile::V, N = Tile::N;
    const auto v_mean = tile.mean([&] {
      const auto x0 = tile.vectors([&](int row, int col, bool active) { return load<V>(in0 + row * 54 + col, active); });
      const auto x1 = tile.vectors([&](int row, int col, bool active) { return load<V>(in1 + row * 54 + col, active); });
      const auto v_add = map<N>([&](int i) { return (x0[i]) + (x1[i]); });
      const auto x2 = tile.vectors([&](int row, int col, bool active) { return load<V>(in2 + col, active); });
      const auto v_mul = map<N>([&](int i) { return (v_add[i]) * (x2[i]); });
      tile.store(v_add, [&](int row, int col, bool active, const auto& x) { store<V>(out0 + row * 54 + col, x, active); });
      return v_mul;
    });
    const int row = tile.row();
    const bool active = tile.active();
    const auto x3 = load<1>(in3 + row, active)[0];
    const auto v_add1 = v_mean + x3;
    const auto v_sigmoid = math::sigmoid(v_add1);
    store<1>(out1 + row, map<1>([&](int) { return v_sigmoid; }), tile.leads());
    store<1>(out2 + row, map<1>([&](int) { return v_mean; }), tile.leads());
  }
};

extern "C" __global__ void __launch_bounds__(512) ENTRY_POINT(const half_t* in0, const half_t* in1, const half_t* in2, half_t* __restrict__ out0, const half_t* in3, half_t* __restrict__ out1, half_t* __restrict__ out2) {
  columnwise<Config>(Body{in0, in1, in2, out0, in3, out1, out2});
}

