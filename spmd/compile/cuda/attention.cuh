// Attention by blocks: tiles of queries and keys in shared memory, scores in registers.
//
// A block of 16 x 16 threads owns a tile of OWN rows and walks over tiles of OTHER rows: queries and
// keys, or the other way around in the gradient of keys. A thread has the products of RUN
// neighbouring rows of its own, those of threadIdx.y, with every 16th of the others. Tiles have rows
// of an odd number of 16 bytes, so that 8 rows lie in different banks.

constexpr int ATTENTION_SIDE = 16, ATTENTION_THREADS = 256;
struct alignas(16) Four { f32 x, y, z, w; };
struct alignas(8) Two { f32 x, y; };
struct alignas(8) FourHalves { u16 x, y, z, w; };

// The score of a key that is not seen. A row whose largest score is no larger saw no key.
constexpr f32 HIDDEN = -0.7f * 3.40282346638528859812e+38f;
inline bool saw_none(f32 top) { return top <= 0.99f * HIDDEN; }

// Elements between rows of a tile with SIZE features, and of a tile of scores.
constexpr int tile_pitch(int size) { return 4 * ((size + 3) / 4 | 1); }
constexpr int scores_pitch(int own, int other) {
  const int run = own / ATTENTION_SIDE, apart = 16 / run;
  // Rows that are RUN apart lie 16 banks apart.
  return other + (other / apart % 2 == 0 ? apart : 0);
}
// Neighbouring features of a thread.
constexpr int features_together(int size) { return size > 32 ? 4 : size > 16 ? 2 : 1; }

// ---- 16 bytes at once -------------------------------------------------------------------------

inline Four load_four(const f32 *place) { return *(const Four *)place; }
inline Four load_four(const f16 *place) {
  const FourHalves v = *(const FourHalves *)place;
  return {f16_value(v.x), f16_value(v.y), f16_value(v.z), f16_value(v.w)};
}
inline Four load_four(const bf16 *place) {
  const FourHalves v = *(const FourHalves *)place;
  return {bf16_value(v.x), bf16_value(v.y), bf16_value(v.z), bf16_value(v.w)};
}
inline void store_four(f32 *place, Four v) { *(Four *)place = v; }
inline void store_four(f16 *place, Four v) {
  *(FourHalves *)place = {f16_bits(v.x), f16_bits(v.y), f16_bits(v.z), f16_bits(v.w)};
}
inline void store_four(bf16 *place, Four v) {
  *(FourHalves *)place = {bf16_bits(v.x), bf16_bits(v.y), bf16_bits(v.z), bf16_bits(v.w)};
}
inline void store_two(f32 *place, f32 x, f32 y) { *(Two *)place = {x, y}; }
inline void store_two(f16 *place, f32 x, f32 y) {
  *(u32 *)place = f16_bits(x) | (u32)f16_bits(y) << 16;
}
inline void store_two(bf16 *place, f32 x, f32 y) {
  *(u32 *)place = bf16_bits(x) | (u32)bf16_bits(y) << 16;
}
inline f32 rounded(f32 x, const f32 *) { return x; }
inline f32 rounded(f32 x, const f16 *) { return round_f16(x); }
inline f32 rounded(f32 x, const bf16 *) { return round_bf16(x); }

// ---- tiles ------------------------------------------------------------------------------------

// Rows into a tile; `at` says where a row begins, negative if there is none: then it is zeros. With
// WIDE all rows begin at multiples of four elements, and SIZE is one.
template <int ROWS, int SIZE, bool WIDE, class T, class At>
void bring(f32 *tile, const T *source, At at) {
  constexpr int PITCH = tile_pitch(SIZE), LANES = WIDE ? 8 : 32;
  const int thread = threadIdx.y * ATTENTION_SIDE + threadIdx.x;
  for (int row = thread / LANES; row < ROWS; row += ATTENTION_THREADS / LANES) {
    const i64 first = at(row);
    if (WIDE) {
      for (int c = thread % LANES * 4; c < SIZE; c += LANES * 4) {
        const Four none = {};
        *(Four *)&tile[row * PITCH + c] = first < 0 ? none : load_four(&source[first + c]);
      }
    } else {
      for (int c = thread % LANES; c < (SIZE + 3) / 4 * 4; c += LANES)
        tile[row * PITCH + c] = first < 0 || c >= SIZE ? 0 : load(&source[first + c]);
    }
  }
}

// One number for each row.
template <int ROWS, class At> void bring_numbers(f32 *tile, const f32 *source, At at) {
  const int thread = threadIdx.y * ATTENTION_SIDE + threadIdx.x;
  if (thread < ROWS) tile[thread] = at(thread) < 0 ? 0 : source[at(thread)];
}

// Products of rows: own row RUN * threadIdx.y + i by other row threadIdx.x + 16 j.
template <int SIZE, int RUN, int COUNT>
void multiply_rows(f32 (&products)[RUN][COUNT], const f32 *own, const f32 *other) {
  constexpr int PITCH = tile_pitch(SIZE);
  own += RUN * threadIdx.y * PITCH;
  other += threadIdx.x * PITCH;
#pragma unroll
  for (int i = 0; i < RUN; i++)
#pragma unroll
    for (int j = 0; j < COUNT; j++) products[i][j] = 0;
#pragma unroll 2
  for (int c = 0; c < SIZE; c += 4) {
    Four x[RUN], y[COUNT];
#pragma unroll
    for (int i = 0; i < RUN; i++) x[i] = *(const Four *)&own[i * PITCH + c];
#pragma unroll
    for (int j = 0; j < COUNT; j++)
      y[j] = *(const Four *)&other[j * ATTENTION_SIDE * PITCH + c];
#pragma unroll
    for (int i = 0; i < RUN; i++)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        products[i][j] += x[i].x * y[j].x;
        products[i][j] += x[i].y * y[j].y;
        products[i][j] += x[i].z * y[j].z;
        products[i][j] += x[i].w * y[j].w;
      }
  }
}

// The sums of a thread: for its own rows, features in groups of neighbours.
template <int SIZE, int RUN> struct Sums {
  static constexpr int TOGETHER = features_together(SIZE);
  static constexpr int GROUPS = (SIZE + 16 * TOGETHER - 1) / (16 * TOGETHER);
  static constexpr bool WHOLE = SIZE % (16 * TOGETHER) == 0;
  f32 of[RUN][GROUPS * TOGETHER];

  void clear() {
#pragma unroll
    for (int i = 0; i < RUN; i++)
#pragma unroll
      for (int f = 0; f < GROUPS * TOGETHER; f++) of[i][f] = 0;
  }
  void shrink(int i, f32 by) {
#pragma unroll
    for (int f = 0; f < GROUPS * TOGETHER; f++) of[i][f] *= by;
  }
  static int feature(int group) { return TOGETHER * (threadIdx.x + ATTENTION_SIDE * group); }
  // Whether a tile has memory for the features of a group.
  static bool there(int group) { return WHOLE || feature(group) < (SIZE + 3) / 4 * 4; }

  // Add the weighted rows of a tile: `weights` has COUNT of them for each own row.
  template <int COUNT> void add(const f32 *weights, int pitch, const f32 *tile) {
    weights += RUN * threadIdx.y * pitch;
#pragma unroll 1
    for (int s = 0; s < COUNT; s += 4) {
      f32 w[RUN][4];
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        const Four v = *(const Four *)&weights[i * pitch + s];
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
      }
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const f32 *row = &tile[(s + q) * tile_pitch(SIZE)];
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
          if (!there(g)) continue;
          f32 x[TOGETHER];
          if (TOGETHER == 4) {
            const Four v = *(const Four *)&row[feature(g)];
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
          } else if (TOGETHER == 2) {
            const Two v = *(const Two *)&row[feature(g)];
            x[0] = v.x, x[1] = v.y;
          } else {
            x[0] = row[feature(g)];
          }
#pragma unroll
          for (int i = 0; i < RUN; i++)
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) of[i][g * TOGETHER + k] += w[i][q] * x[k];
        }
      }
    }
  }

  // Write them where `at` says that an own row begins, times `factor(i)`.
  template <bool WIDE, class T, class At, class Factor> void write(T *out, At at, Factor factor) {
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      const i64 first = at(RUN * threadIdx.y + i);
      if (first < 0) continue;
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const int c = feature(g);
        const f32 *x = &of[i][g * TOGETHER];
        if (WIDE && TOGETHER == 4) {
          const f32 by = factor(i);
          if (there(g)) store_four(&out[first + c], {x[0] * by, x[1] * by, x[2] * by, x[3] * by});
        } else if (WIDE && TOGETHER == 2) {
          if (there(g)) store_two(&out[first + c], x[0] * factor(i), x[1] * factor(i));
        } else {
#pragma unroll
          for (int k = 0; k < TOGETHER; k++)
            if (c + k < SIZE) store(&out[first + c + k], x[k] * factor(i));
        }
      }
    }
  }
};

// ---- the sizes of one launch, and where rows lie ------------------------------------------------

// Queries (B, T, K, G, H), keys (B, S, K, H), numbers of queries (B, K, G, T). A block works for one
// member of the batch and one key head; its queries are the rows g * T + t.
struct Attended {
  int batch, head, heads, groups, queries, keys, size;

  i64 query(int row) const {
    const int g = row / queries, t = row % queries;
    return ((((i64)batch * queries + t) * heads + head) * groups + g) * size;
  }
  i64 key(int s) const { return (((i64)batch * keys + s) * heads + head) * size; }
  i64 number(int row) const { return ((i64)batch * heads + head) * rows() + row; }
  int rows() const { return groups * queries; }
  // The first and the last position among rows that are neighbours.
  int first_of(int row, int count) const {
    return row / queries == last(row, count) / queries ? row % queries : 0;
  }
  int last_of(int row, int count) const {
    const int end = last(row, count);
    return row / queries == end / queries ? end % queries : queries - 1;
  }
  int last(int row, int count) const { return (row + count < rows() ? row + count : rows()) - 1; }
};

// ---- forward ----------------------------------------------------------------------------------

// `score(product, row, key, seen)` is the score of a product. `near(first, last, key, count)` says
// whether queries at these positions may see one of the keys. MASKED: a row may see none of those;
// then it takes the average of all values, so the other keys are visited, too.
template <int OWN, int OTHER, int SIZE, bool WIDE, bool MASKED, bool NUMBERS, class T, class Score,
          class Near>
void attend(f32 *shared, const T *q, const T *k, const T *v, T *out, f32 *top, f32 *rest,
            Attended at, int first, Score score, Near near) {
  constexpr int RUN = OWN / ATTENTION_SIDE, COUNT = OTHER / ATTENTION_SIDE;
  constexpr int PITCH = tile_pitch(SIZE), SCORES = scores_pitch(OWN, OTHER);
  f32 *queries = shared, *keys = queries + OWN * PITCH, *values = keys + OTHER * PITCH;
  f32 *weights = values + OTHER * PITCH, *numbers = weights + OWN * SCORES;
  const f32 NOTHING = -bits_as<f32>(0x7f800000u);
  const int own = RUN * threadIdx.y;
  const auto query_at = [&](int row) {
    return first + row < at.rows() ? at.query(first + row) : (i64)-1;
  };
  bring<OWN, SIZE, WIDE>(queries, q, query_at);
  f32 most[RUN], total[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) most[i] = NOTHING, total[i] = 0;
  Sums<SIZE, RUN> sums;
  sums.clear();
  const int from = at.first_of(first, OWN), to = at.last_of(first, OWN);
  for (int round = 0; round < (MASKED ? 2 : 1); round++) {
    for (int start = 0; start < at.keys; start += OTHER) {
      if (near(from, to, start, OTHER) == (round == 1)) continue;
      const auto key_at = [&](int s) { return start + s < at.keys ? at.key(start + s) : (i64)-1; };
      bring<OTHER, SIZE, WIDE>(keys, k, key_at);
      bring<OTHER, SIZE, WIDE>(values, v, key_at);
      __syncthreads();
      f32 s[RUN][COUNT];
      multiply_rows<SIZE>(s, queries, keys);
#pragma unroll
      for (int i = 0; i < RUN; i++) {
        const int row = first + own + i;
        f32 highest = most[i];
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          const int key = start + threadIdx.x + ATTENTION_SIDE * j;
          bool seen = true;
          s[i][j] = row < at.rows() && key < at.keys ? score(s[i][j], row, key, seen) : NOTHING;
          highest = larger(highest, s[i][j]);
        }
        highest = reduce_lanes<Max, ATTENTION_SIDE>(highest);
        // Where all scores are minus infinity until now, nothing is subtracted.
        const f32 base = highest == NOTHING ? 0 : highest;
        const f32 shrink = expf(most[i] - base);
        most[i] = highest;
        f32 sum = 0;
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          const f32 weight = expf(s[i][j] - base);
          sum += weight;
          weights[(own + i) * SCORES + threadIdx.x + ATTENTION_SIDE * j] = rounded(weight, q);
        }
        total[i] = total[i] * shrink + reduce_lanes<Add, ATTENTION_SIDE>(sum);
        sums.shrink(i, shrink);
      }
      __syncthreads();
      sums.template add<OTHER>(weights, SCORES, values);
      __syncthreads();
    }
    if (!MASKED || round == 1) break;
    if (threadIdx.x == 0)
      for (int i = 0; i < RUN; i++) numbers[own + i] = most[i];
    __syncthreads();
    bool none = false;
    for (int row = 0; row < OWN && first + row < at.rows(); row++)
      none = none || saw_none(numbers[row]);
    if (!none) break;
  }
  sums.template write<WIDE>(out, query_at, [&](int i) { return 1 / total[i]; });
  if (NUMBERS) {
    if (threadIdx.x == 0)
      for (int i = 0; i < RUN; i++) {
        numbers[OWN + own + i] = most[i];
        numbers[2 * OWN + own + i] = logf(total[i]);
      }
    __syncthreads();
    const int row = threadIdx.y * ATTENTION_SIDE + threadIdx.x;
    if (row < OWN && first + row < at.rows()) {
      top[at.number(first + row)] = numbers[OWN + row];
      rest[at.number(first + row)] = numbers[2 * OWN + row];
    }
  }
}

// ---- backward ---------------------------------------------------------------------------------

// The gradient of queries: their scores are computed again, tile by tile of keys.
template <int OWN, int OTHER, int SIZE, bool WIDE, class T, class Score, class Near>
void attend_query_grad(f32 *shared, const T *q, const T *k, const T *v, const f32 *top,
                       const f32 *rest, const f32 *delta, const T *ct, T *dq, Attended at,
                       int first, f32 scale, Score score, Near near) {
  constexpr int RUN = OWN / ATTENTION_SIDE, COUNT = OTHER / ATTENTION_SIDE;
  constexpr int PITCH = tile_pitch(SIZE), SCORES = scores_pitch(OWN, OTHER);
  f32 *queries = shared, *cts = queries + OWN * PITCH, *keys = cts + OWN * PITCH;
  f32 *values = keys + OTHER * PITCH, *slopes = values + OTHER * PITCH;
  f32 *tops = slopes + OWN * SCORES, *rests = tops + OWN, *deltas = rests + OWN;
  const int own = RUN * threadIdx.y;
  const auto query_at = [&](int row) {
    return first + row < at.rows() ? at.query(first + row) : (i64)-1;
  };
  const auto number_at = [&](int row) {
    return first + row < at.rows() ? at.number(first + row) : (i64)-1;
  };
  bring<OWN, SIZE, WIDE>(queries, q, query_at);
  bring<OWN, SIZE, WIDE>(cts, ct, query_at);
  bring_numbers<OWN>(tops, top, number_at);
  bring_numbers<OWN>(rests, rest, number_at);
  bring_numbers<OWN>(deltas, delta, number_at);
  Sums<SIZE, RUN> sums;
  sums.clear();
  // Where keys are not seen, the gradient is zero.
  const int from = at.first_of(first, OWN), to = at.last_of(first, OWN);
  for (int start = 0; start < at.keys; start += OTHER) {
    if (!near(from, to, start, OTHER)) continue;
    const auto key_at = [&](int s) { return start + s < at.keys ? at.key(start + s) : (i64)-1; };
    bring<OTHER, SIZE, WIDE>(keys, k, key_at);
    bring<OTHER, SIZE, WIDE>(values, v, key_at);
    __syncthreads();
    f32 s[RUN][COUNT], moved[RUN][COUNT];
    multiply_rows<SIZE>(s, queries, keys);
    multiply_rows<SIZE>(moved, cts, values);
#pragma unroll
    for (int i = 0; i < RUN; i++)
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        const int row = first + own + i, key = start + threadIdx.x + ATTENTION_SIDE * j;
        f32 slope = 0;
        if (row < at.rows() && key < at.keys) {
          bool seen = true;
          const f32 weight = expf(score(s[i][j], row, key, seen) - tops[own + i] - rests[own + i]);
          slope = seen ? weight * (moved[i][j] - deltas[own + i]) * scale : 0;
        }
        slopes[(own + i) * SCORES + threadIdx.x + ATTENTION_SIDE * j] = rounded(slope, q);
      }
    __syncthreads();
    sums.template add<OTHER>(slopes, SCORES, keys);
    __syncthreads();
  }
  sums.template write<WIDE>(dq, query_at, [](int) { return 1.0f; });
}

// The gradients of keys and values: a block has some keys, and walks over the queries.
template <int OWN, int OTHER, int SIZE, bool WIDE, bool MASKED, class T, class Score, class Near>
void attend_key_grad(f32 *shared, const T *q, const T *k, const T *v, const f32 *top,
                     const f32 *rest, const f32 *delta, const T *ct, T *dk, T *dv, Attended at,
                     int first, f32 scale, Score score, Near near) {
  constexpr int RUN = OWN / ATTENTION_SIDE, COUNT = OTHER / ATTENTION_SIDE;
  constexpr int PITCH = tile_pitch(SIZE), SCORES = scores_pitch(OWN, OTHER);
  f32 *keys = shared, *values = keys + OWN * PITCH, *queries = values + OWN * PITCH;
  f32 *cts = queries + OTHER * PITCH, *slopes = cts + OTHER * PITCH;
  f32 *weights = slopes + OWN * SCORES, *tops = weights + OWN * SCORES, *rests = tops + OTHER;
  f32 *deltas = rests + OTHER;
  const int own = RUN * threadIdx.y;
  const auto key_at = [&](int s) { return first + s < at.keys ? at.key(first + s) : (i64)-1; };
  bring<OWN, SIZE, WIDE>(keys, k, key_at);
  bring<OWN, SIZE, WIDE>(values, v, key_at);
  Sums<SIZE, RUN> dkeys, dvalues;
  dkeys.clear();
  dvalues.clear();
  for (int start = 0; start < at.rows(); start += OTHER) {
    const auto query_at = [&](int row) {
      return start + row < at.rows() ? at.query(start + row) : (i64)-1;
    };
    const auto number_at = [&](int row) {
      return start + row < at.rows() ? at.number(start + row) : (i64)-1;
    };
    bool visit = near(at.first_of(start, OTHER), at.last_of(start, OTHER), first, OWN);
    if (!visit && !MASKED) continue;
    bring_numbers<OTHER>(tops, top, number_at);
    if (!visit) {
      // None of these queries sees a key of here, but one that sees nothing weighs all values.
      __syncthreads();
      for (int row = 0; row < OTHER && start + row < at.rows(); row++)
        visit = visit || saw_none(tops[row]);
    }
    if (visit) {
      bring<OTHER, SIZE, WIDE>(queries, q, query_at);
      bring<OTHER, SIZE, WIDE>(cts, ct, query_at);
      bring_numbers<OTHER>(rests, rest, number_at);
      bring_numbers<OTHER>(deltas, delta, number_at);
      __syncthreads();
      f32 s[RUN][COUNT], moved[RUN][COUNT];
      multiply_rows<SIZE>(s, keys, queries);
      multiply_rows<SIZE>(moved, values, cts);
#pragma unroll
      for (int i = 0; i < RUN; i++)
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
          const int other = threadIdx.x + ATTENTION_SIDE * j;
          const int row = start + other, key = first + own + i;
          f32 weight = 0, slope = 0;
          if (row < at.rows() && key < at.keys) {
            bool seen = true;
            weight = expf(score(s[i][j], row, key, seen) - tops[other] - rests[other]);
            slope = seen ? weight * (moved[i][j] - deltas[other]) * scale : 0;
          }
          slopes[(own + i) * SCORES + other] = rounded(slope, q);
          weights[(own + i) * SCORES + other] = rounded(weight, q);
        }
      __syncthreads();
      dkeys.template add<OTHER>(slopes, SCORES, queries);
      dvalues.template add<OTHER>(weights, SCORES, cts);
    }
    __syncthreads();
  }
  dkeys.template write<WIDE>(dk, key_at, [](int) { return 1.0f; });
  dvalues.template write<WIDE>(dv, key_at, [](int) { return 1.0f; });
}
