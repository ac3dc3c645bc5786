#include "elementwise.cuh"
using namespace gtco;

struct Config {
  static constexpr int ROWS = 21, COLUMNS = 592;
  static constexpr int V = 2;
  static constexpr int VECTORS = 1, THREADS = 256;
};

struct Body {
  const half_t* in0;
  half_t* __restrict__ out0;
  template <class Tile>
  __device__ __forceinline__ void operator()(Tile& tile) const {
    constexpr int V = Tile::V, N = Tile::N;
    const auto v_pad = tile.vectors([&](int row, int col, bool active) { const int at1 = (row % 7) - 1, at2 = col; return load<V>(in0 + (row / 7) * 3528 + (at1 / 3) * 588 + (at1 % 3) * 14 + (at2 / 196) * 1176 + ((at2 / 14) % 14) * 42 + (at2 % 14), active && at1 >= 0 && at2 < 588); });
    tile.store(v_pad, [&](int row, int col, bool active, const auto& x) { store<V>(out0 + row * 592 + col, x, active); });
  }
};

extern "C" __global__ void __launch_bounds__(256) ENTRY_POINT(const half_t* in0, half_t* __restrict__ out0) {
  elementwise<Config>(Body{in0, out0});
}

