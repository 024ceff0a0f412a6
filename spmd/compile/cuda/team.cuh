// Threads that work on one row together, a team: how they combine their values.
//
// The order of every combination is fixed by the shape alone, there are no atomics: results are the
// same bits on every run. Teams are powers of two. "Rows": a team lies along threadIdx.x, several
// teams along y. "Columns": neighbouring threads along x belong to different rows, a team lies along
// y. All threads of a block call these functions together.

struct Add { template <class T> static T apply(T x, T y) { return add(x, y); } };
struct Mul { template <class T> static T apply(T x, T y) { return mul(x, y); } };
struct Max { template <class T> static T apply(T x, T y) { return larger(x, y); } };
struct Min { template <class T> static T apply(T x, T y) { return smaller(x, y); } };
struct And { template <class T> static T apply(T x, T y) { return bit_and(x, y); } };
struct Or { template <class T> static T apply(T x, T y) { return bit_or(x, y); } };
struct Xor { template <class T> static T apply(T x, T y) { return bit_xor(x, y); } };

// A candidate of argmax and argmin: a negative position means that there is none yet.
template <class T> struct Found { T value; i64 position; };

template <bool Largest> struct Best {
  // NaN wins over every number, the first of equals wins.
  template <class T> static Found<T> apply(Found<T> x, Found<T> y) {
    if (x.position < 0 || y.position < 0) return x.position < 0 ? y : x;
    const bool x_nan = x.value != x.value, y_nan = y.value != y.value;
    const bool x_better = Largest ? x.value > y.value : x.value < y.value;
    const bool y_better = Largest ? y.value > x.value : y.value < x.value;
    if (x_nan != y_nan) return x_nan ? x : y;
    if (x_better || y_better) return x_better ? x : y;
    return x.position < y.position ? x : y;
  }
};
typedef Best<true> ArgMax;
typedef Best<false> ArgMin;

// ---- inside a warp --------------------------------------------------------------------------------

template <class T> union Words {
  T value;
  u32 words[(sizeof(T) + 3) / 4];
};

template <class T> T from_lane_across(T value, int distance) {
  Words<T> box;
  box.words[0] = 0;
  box.value = value;
  for (int k = 0; k < (int)((sizeof(T) + 3) / 4); k++)
    box.words[k] = __shfl_xor_sync(0xffffffffu, box.words[k], distance);
  return box.value;
}
template <class T> T from_lane_before(T value, int distance) {
  Words<T> box;
  box.words[0] = 0;
  box.value = value;
  for (int k = 0; k < (int)((sizeof(T) + 3) / 4); k++)
    box.words[k] = __shfl_up_sync(0xffffffffu, box.words[k], distance);
  return box.value;
}

// Every one of WIDTH neighbouring lanes gets the combination of all of them: a butterfly, in which
// both sides combine the same two values.
template <class Op, int WIDTH, class T> T reduce_lanes(T value) {
  for (int distance = WIDTH / 2; distance > 0; distance /= 2)
    value = Op::apply(value, from_lane_across(value, distance));
  return value;
}

// ---- a team's reduction: every thread gets the result ----------------------------------------------

// `slots` has one T for each warp of the block; unused by teams of up to one warp.
template <class Op, int TEAM, class T> T reduce_rows(T value, T *slots) {
  constexpr int LANES = TEAM < 32 ? TEAM : 32, WARPS = TEAM / LANES;
  value = reduce_lanes<Op, LANES>(value);
  if (WARPS == 1) return value;
  slots += threadIdx.y * WARPS;
  __syncthreads();  // an earlier reduction may still be reading the slots
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = value;
  __syncthreads();
  return reduce_lanes<Op, WARPS>(slots[threadIdx.x % WARPS]);
}

// `slots` has one T for each thread of the block.
template <class Op, int TEAM, class T> T reduce_columns(T value, T *slots) {
  if (TEAM == 1) return value;
  const int place = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // an earlier reduction may still be reading the slots
  slots[place] = value;
  for (int half = TEAM / 2; half > 0; half /= 2) {
    __syncthreads();
    if ((int)threadIdx.y < half)
      slots[place] = Op::apply(slots[place], slots[place + half * blockDim.x]);
  }
  __syncthreads();
  return slots[threadIdx.x];
}

// ---- a team's running combination (teams along x) ---------------------------------------------------

// Each thread gets the combination of `before` and the values up to and including its own; `before`
// becomes that of the team's last thread. `slots` has one T for each warp of the block.
template <class Op, int TEAM, class T> T scan_rows(T value, T &before, T *slots) {
  constexpr int LANES = TEAM < 32 ? TEAM : 32, WARPS = TEAM / LANES;
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / LANES;
  for (int distance = 1; distance < LANES; distance *= 2) {
    const T left = from_lane_before(value, distance);
    if (lane >= distance) value = Op::apply(left, value);
  }
  slots += threadIdx.y * WARPS;
  __syncthreads();  // the step before may still be reading the slots
  if (lane == LANES - 1) slots[warp] = value;
  __syncthreads();
  T ahead = before;
  for (int k = 0; k < WARPS; k++) {
    if (k == warp) value = Op::apply(ahead, value);
    ahead = Op::apply(ahead, slots[k]);
  }
  before = ahead;
  return value;
}
