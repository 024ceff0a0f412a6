// Stable sorting of rows by merging: tiles are sorted in shared memory, then sorted runs are merged
// two by two.
//
// A key's place in a merged pair of runs is its place in its own run, plus the count of keys of the
// other run that come before it: a binary search, and no key waits for another. Of equal keys those
// of the left run come first, so the order depends on nothing but the keys.

struct Numbers {  // NaNs last, all alike, and -0.0 like 0.0
  template <class T> static bool before(T x, T y) { return x < y || (y != y && x == x); }
};
struct UpperHalves {
  static bool before(u64 x, u64 y) { return x >> 32 < y >> 32; }
};
struct WholeWords {
  static bool before(u64 x, u64 y) { return x < y; }
};

// Where the key with index `at` of two neighbouring runs goes when they are merged.
template <class Order, class T>
int merged_place(const T *runs, int lefts, int rights, int at) {
  const bool is_left = at < lefts;
  const T key = runs[at];
  const int first = is_left ? lefts : 0;
  int low = 0, high = is_left ? rights : lefts;
  while (low < high) {
    const int middle = (low + high) / 2;
    const T other = runs[first + middle];
    if (is_left ? Order::before(other, key) : !Order::before(key, other))
      low = middle + 1;
    else
      high = middle;
  }
  return is_left ? at + low : at - lefts + low;
}

// How many keys of the left run are among the first `count` of two neighbouring runs merged.
template <class Order, class T, class I>
I from_the_left(const T *runs, I lefts, I rights, I count) {
  I low = count > rights ? count - rights : 0, high = count < lefts ? count : lefts;
  while (low < high) {
    const I middle = (low + high) / 2;
    if (Order::before(runs[lefts + (count - 1 - middle)], runs[middle]))
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Sort each tile of WIDTH keys of rows of `size` keys, and write the first `kept` of each behind each
// other in rows of `pitch` keys. A block has SLOTS keys; `keys` has room for twice as many.
template <class Order, int WIDTH, int SLOTS, class T, class I>
void sort_tiles(const T *source, T *target, I rows, I size, int kept, I pitch, T *keys) {
  const I tiles = (size + WIDTH - 1) / WIDTH;
  int from = 0;
  for (int slot = threadIdx.x; slot < SLOTS; slot += blockDim.x) {
    const I tile = (I)blockIdx.x * (SLOTS / WIDTH) + slot / WIDTH;
    const I row = tile / tiles, at = tile % tiles * WIDTH + slot % WIDTH;
    if (row < rows && at < size) keys[slot] = source[row * size + at];
  }
#pragma unroll 1
  for (int run = 1; run < WIDTH; run *= 2) {
    __syncthreads();
    for (int slot = threadIdx.x; slot < SLOTS; slot += blockDim.x) {
      const I tile = (I)blockIdx.x * (SLOTS / WIDTH) + slot / WIDTH;
      const I first = tile % tiles * WIDTH;
      const int i = slot % WIDTH, pair = i & -(2 * run);
      const int filled = (int)(size - first < WIDTH ? size - first : WIDTH);
      if (tile / tiles >= rows || i >= filled) continue;
      const int rest = filled - pair, lefts = rest < run ? rest : run;
      const int rights = rest - lefts < run ? rest - lefts : run;
      const int base = slot - i + pair;
      const int place = merged_place<Order>(keys + from + base, lefts, rights, i - pair);
      keys[SLOTS - from + base + place] = keys[from + slot];
    }
    from = SLOTS - from;
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < SLOTS; slot += blockDim.x) {
    const I tile = (I)blockIdx.x * (SLOTS / WIDTH) + slot / WIDTH;
    const I row = tile / tiles, number = tile % tiles;
    const int i = slot % WIDTH;
    if (row < rows && number * WIDTH + i < size && i < kept)
      target[row * pitch + number * kept + i] = keys[from + slot];
  }
}

// Merge sorted runs of `run` keys two by two, in rows of `size` keys; a block writes TILE of them.
// `keys` has room for twice as many, and for two counts behind.
template <class Order, int TILE, class T, class I>
void merge_runs(const T *source, T *target, I size, I run, T *keys) {
  const I tiles = (size + TILE - 1) / TILE, first = blockIdx.x % tiles * TILE;
  const I pair = first / (2 * run) * (2 * run), begin = first - pair;
  const I lefts = size - pair < run ? size - pair : run;
  const I rights = size - pair - lefts < run ? size - pair - lefts : run;
  const I end = begin + TILE < lefts + rights ? begin + TILE : lefts + rights;
  I *bounds = (I *)(keys + 2 * TILE);
  source += blockIdx.x / tiles * size + pair;
  target += blockIdx.x / tiles * size + first;
  if (threadIdx.x < 2)
    bounds[threadIdx.x] = from_the_left<Order>(source, lefts, rights, threadIdx.x ? end : begin);
  __syncthreads();
  const I left = bounds[0], right = lefts + begin - left;
  const int count = (int)(end - begin), ours = (int)(bounds[1] - left);
  for (int k = threadIdx.x; k < count; k += blockDim.x)
    keys[k] = source[k < ours ? left + k : right + (k - ours)];
  __syncthreads();
  for (int k = threadIdx.x; k < count; k += blockDim.x)
    keys[TILE + merged_place<Order>(keys, ours, count - ours, k)] = keys[k];
  __syncthreads();
  for (int k = threadIdx.x; k < count; k += blockDim.x) target[k] = keys[TILE + k];
}
