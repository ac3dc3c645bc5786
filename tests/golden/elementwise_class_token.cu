#include "elementwise.cuh"
using namespace gtco;

struct Config {
  static constexpr int ROWS = 197, COLUMNS = 768;
  static constexpr int V = 8;
  static constexpr int VECTORS = 1, THREADS = 256;
};

struct Body {
  const half_t* in0;
  const half_t* in1;
  const half_t* in2;
  half_t* __restrict__ out0;
  template <class Tile>
  __device__ __forceinline__ void operator()(Tile& tile) const {
    constexpr int V = Tile::V, N = Tile::N;
    const auto v_concat = tile.vectors([&](int row, int col, bool active) { const int at = row; return at < 1 ? load<V>(in0 + col, active) : load<V>(in1 + row * 768 + col + -768, active); });
    const auto x0 = tile.vectors([&](int row, int col, bool active) { return load<V>(in2 + row * 768 + col, active); });
    const auto v_add = map<N>([&](int i) { return (v_concat[i]) + (x0[i]); });
    tile.store(v_add, [&](int row, int col, bool active, const auto& x) { store<V>(out0 + row * 768 + col, x, active); });
  }
};

extern "C" __global__ void __launch_bounds__(256) ENTRY_POINT(const half_t* in0, const half_t* in1, const half_t* in2, half_t* __restrict__ out0) {
  elementwise<Config>(Body{in0, in1, in2, out0});
}

