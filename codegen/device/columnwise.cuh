// Reductions of columns: neighbouring threads have neighbouring vectors of V columns, which lie
// side by side in memory, and walk down the rows, VECTORS of them under way. Nothing but what is
// reduced stays in registers, so there may be any number of rows.
//
// Config: ROWS, COLUMNS, V (divides COLUMNS), LENGTH (rows of a piece, which are reduced: a divisor
// of ROWS), DEPTH (neighbouring columns that are reduced too), LANES (threads side by side),
// VECTORS, THREADS. A block has LANES * V columns, whole results, of one piece.
#pragma once

#include "rowwise.cuh"

namespace gtco {

// What a function of no arguments gives the elements of: a Vec<T, N>.
template <class F>
using walked_t = decltype(element_of((*static_cast<F*>(nullptr))()));

// A thread's V columns of the iteration space (ROWS, COLUMNS), at VECTORS rows at a time.
template <class C>
class ColumnTile {
 public:
  static constexpr int V = C::V;
  static constexpr int N = C::VECTORS * V;
  static constexpr int DOWN = C::THREADS / C::LANES;  // threads below each other
  static constexpr int SPAN = C::LANES * V;           // columns of a block
  static constexpr int SLABS = ceil_div(C::COLUMNS, SPAN);
  static constexpr int RESULTS = SPAN / C::DEPTH;  // of a block
  // Whether each thread always has a row.
  static constexpr bool EVEN = C::THREADS % C::LANES == 0 && C::LENGTH % (DOWN * C::VECTORS) == 0;
  static_assert(C::COLUMNS % V == 0, "a vector does not cross a row's end");
  static_assert(SPAN % C::DEPTH == 0 && C::COLUMNS % C::DEPTH == 0, "a result is one block's");
  static_assert(DOWN >= 1 && RESULTS <= C::THREADS, "a thread for each result");
  static_assert(C::ROWS % C::LENGTH == 0, "pieces are of one size");

  __device__ __forceinline__ explicit ColumnTile(unsigned char* smem) : smem_(smem) {
    const auto block = in_order(blockIdx.x, gridDim.x);
    slab_ = block % SLABS;
    piece_ = block / SLABS;
    thread_ = threadIdx.x;
    down_ = thread_ / C::LANES;
    col_ = slab_ * SPAN + thread_ % C::LANES * V;
  }

  // Which result the thread comes to hold, and whether it holds one.
  __device__ __forceinline__ int row() const {
    return piece_ * (C::COLUMNS / C::DEPTH) + slab_ * RESULTS + thread_;
  }
  __device__ __forceinline__ bool active() const {
    return thread_ < RESULTS && slab_ * SPAN + thread_ * C::DEPTH < C::COLUMNS;
  }
  __device__ __forceinline__ bool leads() const { return active(); }

  // f(row, col, active) for each vector under way; f gives a Vec<T, V>. A thread that has none
  // reads another one's, which no result takes: loads behind conditions would wait for each other.
  template <class F>
  __device__ __forceinline__ Vec<loaded_t<F>, N> vectors(F f) const {
    Vec<loaded_t<F>, N> r;  // (VECTORS, V)
    const int col = C::COLUMNS % SPAN == 0 ? col_ : min_of(col_, C::COLUMNS - V);
#pragma unroll
    for (int s = 0; s < C::VECTORS; ++s) {
      const int below = down(s, first_), row = EVEN ? below : min_of(below, C::LENGTH - 1);
      const auto part = f(piece_ * C::LENGTH + row, col, true);
#pragma unroll
      for (int i = 0; i < V; ++i) r[s * V + i] = part[i];
    }
    return r;
  }

  // f(row, col, active, vector) for each vector of `values`.
  template <class T, class F>
  __device__ __forceinline__ void store(const Vec<T, N>& values, F f) const {
#pragma unroll
    for (int s = 0; s < C::VECTORS; ++s)
      f(piece_ * C::LENGTH + down(s, first_), col_, active(s, first_),
        map<V>([&](int i) { return values[s * V + i]; }));
  }

  // Of each result, in the thread that holds it. f() gives the Vec<T, N> of the rows under way.
  template <class F>
  __device__ __forceinline__ walked_t<F> sum(F f) {
    using T = walked_t<F>;
    return reduce(f, T(0), [](T a, T b) { return a + b; });
  }

  template <class F>
  __device__ __forceinline__ walked_t<F> mean(F f) {
    return sum(f) / walked_t<F>(C::LENGTH * C::DEPTH);
  }

  template <class F>
  __device__ __forceinline__ walked_t<F> amax(F f) {
    using T = walked_t<F>;
    return reduce(f, lowest<T>(), [](T a, T b) { return math::max_nan(a, b); });
  }

  // Mean and sum of squared deviations of each result, as of `put_moments`.
  template <int PLANE = 0, class F>
  __device__ __forceinline__ void store_moments(float* stats, F f) {
    reduce_moments<PLANE>(stats, f, 1.0f);
  }

  // The same where an element is the mean of `count` and their mean squared deviation from it.
  template <class F>
  __device__ __forceinline__ void merge_moments(float* stats, F f, float count) {
    reduce_moments<0>(stats, f, count);
  }

 private:
  // A thread sums how far its rows are from the first of them, and the squares of that: what
  // cancels is of the size of the spread, however large the mean is.
  template <int PLANE, class F>
  __device__ __forceinline__ void reduce_moments(float* stats, F f, float of_each) {
    float origin[V], total[V], squares[V];
#pragma unroll
    for (int i = 0; i < V; ++i) total[i] = squares[i] = 0.0f;
    float count = 0.0f;  // rows so far
    walk(f, [&](int first, const auto& x) {
      if (first == 0) {
#pragma unroll
        for (int i = 0; i < V; ++i) origin[i] = as_moments(x[i]).mean;
      }
#pragma unroll
      for (int s = 0; s < C::VECTORS; ++s) {
        const bool counts = active(s, first);
        count += counts ? 1.0f : 0.0f;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const Moments own = as_moments(x[s * V + i]);
          const float apart = counts ? own.mean - origin[i] : 0.0f;
          total[i] += apart;
          squares[i] = fmaf(apart, apart, squares[i]) + (counts ? own.m2 : 0.0f);
        }
      }
    });
    Moments own[V];
    const float share = count > 0.0f ? 1.0f / count : 0.0f;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float mean = total[i] * share;
      own[i] = {origin[i] + mean, ptx::max_nan(squares[i] - total[i] * mean, 0.0f)};
    }
    float* counts = slots<float>() + 2 * V * C::THREADS;
    meet(
        [&] {
          counts[thread_] = count;
          put(own);
        },
        [&](int from) {
          const float there = counts[from];
#pragma unroll
          for (int i = 0; i < V; ++i)
            own[i] = merged(own[i], count, slots<Moments>()[i * C::THREADS + from], there);
          count += there;
        });
    if (down_ == 0) put(own);
    __syncthreads();
    if (!active()) return;
    // All columns are of one length: their means' mean, then how far each is from it.
    float mean = 0.0f, m2 = 0.0f;
#pragma unroll 8
    for (int i = 0; i < C::DEPTH; ++i) mean += of_column<Moments>(thread_ * C::DEPTH + i).mean;
    mean /= C::DEPTH;
#pragma unroll 8
    for (int i = 0; i < C::DEPTH; ++i) {
      const Moments column = of_column<Moments>(thread_ * C::DEPTH + i);
      const float apart = column.mean - mean;
      m2 += fmaf(C::LENGTH * apart, apart, column.m2);
    }
    put_moments<PLANE>(stats, row(), {mean, of_each * m2});
  }

  // Of the piece, where the rows under way begin at `first`.
  __device__ __forceinline__ int down(int s, int first) const { return first + s * DOWN + down_; }
  __device__ __forceinline__ bool active(int s, int first) const {
    return (EVEN || (down_ < DOWN && down(s, first) < C::LENGTH)) &&
           (C::COLUMNS % SPAN == 0 || col_ < C::COLUMNS);
  }

  // take(first, f()) with the rows under way moving down the piece from `first` = 0 on. What f
  // loads of the next ones is under way while these are taken.
  template <class F, class G>
  __device__ __forceinline__ void walk(F f, G take) {
    constexpr int STEP = DOWN * C::VECTORS;
    auto next = f();
#pragma unroll 1
    for (int first = 0; first < C::LENGTH; first += STEP) {
      const auto now = next;
      first_ = first + STEP;
      if (first_ < C::LENGTH) next = f();
      take(first, now);
    }
  }

  // Shared memory: (V, THREADS).
  template <class T>
  __device__ __forceinline__ T* slots() const {
    return reinterpret_cast<T*>(smem_);
  }
  template <class T>
  __device__ __forceinline__ void put(const T (&x)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) slots<T>()[i * C::THREADS + thread_] = x[i];
  }
  // What the uppermost thread of a column has put.
  template <class T>
  __device__ __forceinline__ T of_column(int column) const {
    return slots<T>()[column % V * C::THREADS + column / V];
  }

  // The upper quarter of the threads takes what those below have, until one has all of a column,
  // always in one order: those give() who are left without, and take(from) thread `from`'s.
  template <class Give, class Take>
  __device__ __forceinline__ void meet(Give give, Take take) {
#pragma unroll
    for (int n = DOWN; n > 1; n = ceil_div(n, 4)) {
      const int rest = ceil_div(n, 4);
      if (down_ >= rest && down_ < n) give();
      __syncthreads();  // what is given next lies above what is taken now
      if (down_ >= rest) continue;
#pragma unroll
      for (int from = rest; from < n; from += rest)
        if (down_ + from < n) take(thread_ + from * C::LANES);
    }
  }

  template <class T, class F, class Combine>
  __device__ __forceinline__ T reduce(F f, T start, Combine combine) {
    T own[V];
#pragma unroll
    for (int i = 0; i < V; ++i) own[i] = start;
    walk(f, [&](int first, const auto& x) {
#pragma unroll
      for (int s = 0; s < C::VECTORS; ++s)
#pragma unroll
        for (int i = 0; i < V; ++i)
          own[i] = active(s, first) ? combine(own[i], T(x[s * V + i])) : own[i];
    });
    meet([&] { put(own); },
         [&](int from) {
#pragma unroll
           for (int i = 0; i < V; ++i) own[i] = combine(own[i], slots<T>()[i * C::THREADS + from]);
         });
    if (down_ == 0) put(own);
    __syncthreads();
    if (!active()) return start;
    T result = of_column<T>(thread_ * C::DEPTH);
#pragma unroll 4
    for (int i = 1; i < C::DEPTH; ++i)
      result = combine(result, of_column<T>(thread_ * C::DEPTH + i));
    return result;
  }

  unsigned char* smem_;
  int piece_, slab_, thread_, down_, col_;
  int first_ = 0;  // of the rows under way
};

template <class C, class Body>
__device__ __forceinline__ void columnwise(const Body& body) {
  extern __shared__ __align__(1024) unsigned char smem[];
  ptx::griddepcontrol_launch_dependents();
  ptx::griddepcontrol_wait();
  ColumnTile<C> tile(smem);
  body(tile);
}

}  // namespace gtco
