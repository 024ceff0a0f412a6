// Attention on tensor cores: tiles of queries and keys in shared memory, all else in registers.
//
// A block owns a tile of OWN rows, 16 for each warp, and walks over tiles of OTHER rows, as in
// attention.cuh. `mma.sync` multiplies; a warp's weights go from one product to the next without
// leaving its registers. While a tile is computed with, `cp.async` copies the next one to the other
// of two places, so there is one barrier a tile. Rows lie as in tensor.cuh, as chunks of 16 bytes.
// With PARTS, so many warps have the same rows, and each sums a part of the features. Elements have 16
// bits, or are f32 that are rounded to TF32.

// How elements of T are multiplied: features in a chunk, the depth of an `mma.sync`.
template <class T> struct Multiplied {
  static constexpr int CHUNK = 16 / sizeof(T), DEPTH = 2 * CHUNK;
};

// Features of a tile with zeros behind, and chunks of its rows: as many as `chunk_at` can exchange.
constexpr int whole_features(int size) { return (size + 15) / 16 * 16; }
template <class T> constexpr int row_chunks(int size) {
  const int chunks = whole_features(size) / Multiplied<T>::CHUNK;
  // Lanes read every other row of f32, which lie in different banks if there are eight chunks.
  if (sizeof(T) == 4) return (chunks + 7) / 8 * 8;
  return chunks <= 2 ? 2 : chunks <= 4 ? 4 : (chunks + 7) / 8 * 8;
}
template <class T> constexpr int tile_bytes(int rows, int size) {
  return 16 * rows * row_chunks<T>(size);
}
// The features that a warp sums.
constexpr int part_features(int size, int parts) {
  return (whole_features(size) / 16 + parts - 1) / parts * 16;
}

// A lane has two rows of its warp's 16, and two neighbours of every eight columns.
inline int lane_row(int half) { return threadIdx.x % 32 / 4 + 8 * half; }
inline int lane_column(int tile, int k) { return 8 * tile + threadIdx.x % 4 * 2 + k; }

// ---- tiles ------------------------------------------------------------------------------------

// Begin to copy rows into a tile; `at` says where a row begins, negative if there is none: then it
// is zeros. COPIED elements at a time, where rows begin at multiples of them, and SIZE is one.
template <int ROWS, int SIZE, int COPIED, class T, class At>
void bring_rows(u8 *shared, int tile, const T *source, At at) {
  constexpr int UNITS = whole_features(SIZE) / COPIED, WIDTH = row_chunks<T>(SIZE);
  constexpr int CHUNK = Multiplied<T>::CHUNK;
  for (int t = threadIdx.x; t < ROWS * UNITS; t += blockDim.x) {
    const int row = t / UNITS, c = t % UNITS * COPIED;
    const i64 first = at(row);
    const bool inside = first >= 0 && c < SIZE;
    u8 *to = shared + tile + 16 * chunk_at<WIDTH>(row, c / CHUNK) + (int)sizeof(T) * (c % CHUNK);
    const T *from = &source[inside ? first + c : 0];
    if constexpr (COPIED * sizeof(T) >= 4) {
      constexpr int BYTES = COPIED * sizeof(T);
      copy_async<BYTES>(shared_address(to), from, inside ? BYTES : 0);
    } else {
      *(u16 *)to = inside ? from->bits : (u16)0;
    }
  }
}

// Begin to copy one number for each row.
template <int ROWS, class At> void bring_row_numbers(u8 *shared, int to, const f32 *source, At at) {
  for (int row = threadIdx.x; row < ROWS; row += blockDim.x) {
    const i64 place = at(row);
    const f32 *from = &source[place < 0 ? 0 : place];
    copy_async<4>(shared_address(shared + to + 4 * row), from, place < 0 ? 0 : 4);
  }
}

// ---- products ---------------------------------------------------------------------------------

template <int WIDTH, bool ALONG_SIDE, bool LEFT>
void load_rows(u32 (&tiles)[4], u32 tile, int side, int depth, bf16) {
  load_fragment<WIDTH, ALONG_SIDE, LEFT>(tiles, tile, side, depth);
}
template <int WIDTH, bool ALONG_SIDE, bool LEFT>
void load_rows(u32 (&tiles)[4], u32 tile, int side, int depth, f16) {
  load_fragment<WIDTH, ALONG_SIDE, LEFT>(tiles, tile, side, depth);
}

template <int WIDTH, bool ALONG_SIDE, bool LEFT>
void load_rows(u32 (&tiles)[4], u32 tile, int side, int depth, f32) {
  load_tf32_fragment<WIDTH, ALONG_SIDE, LEFT>(tiles, tile, side, depth);
}
inline u32 as_tf32(f32 x) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
inline u32 load_tf32(u32 at) {
  f32 x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return as_tf32(x);
}

// Products of a warp's rows, from `row` on, with COUNT rows of another tile.
template <class T, int SIZE, int COUNT>
void multiply_warp_rows(f32 (&products)[COUNT / 8][4], u32 own, int row, u32 other) {
  constexpr int WIDTH = row_chunks<T>(SIZE);
#pragma unroll
  for (int j = 0; j < COUNT / 8; j++)
#pragma unroll
    for (int k = 0; k < 4; k++) products[j][k] = 0;
#pragma unroll 4
  for (int c = 0; c < whole_features(SIZE); c += Multiplied<T>::DEPTH) {
    u32 x[4], y[4];
    load_rows<WIDTH, false, true>(x, own, row, c, T());
#pragma unroll
    for (int j = 0; j < COUNT / 8; j += 2) {
      load_rows<WIDTH, false, false>(y, other, 8 * j, c, T());
      multiply_tiles(products[j], x, y[0], y[1], T());
      multiply_tiles(products[j + 1], x, y[2], y[3], T());
    }
  }
}

// Two neighbours, rounded to 16 bits.
inline u32 packed(f32 x, f32 y, bf16) { return bf16_bits(x) | (u32)bf16_bits(y) << 16; }
inline u32 packed(f32 x, f32 y, f16) { return f16_bits(x) | (u32)f16_bits(y) << 16; }

// Add the rows of a tile, weighted: `weights` lie as products do. The sums are those of features from
// `part` on.
template <class T, int SIZE, int COUNT, int FEATURES>
void add_weighted(f32 (&sums)[FEATURES / 8][4], const f32 (&weights)[COUNT / 8][4], u32 tile,
                  int part) {
  constexpr int WIDTH = row_chunks<T>(SIZE);
  if constexpr (sizeof(T) == 4) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int s = 0; s < COUNT / 8; s++) {
      // A lane has neighbours of a row, where the factor wants columns that are four apart: so rows
      // of the tile are taken in another order.
      const u32 x[4] = {as_tf32(weights[s][0]), as_tf32(weights[s][2]), as_tf32(weights[s][1]),
                        as_tf32(weights[s][3])};
      const int row = lane_column(s, 0);
#pragma unroll
      for (int f = 0; f < FEATURES / 8; f++) {
        if (whole_features(SIZE) % FEATURES && part + 8 * f >= whole_features(SIZE)) break;
        const int c = part + 8 * f + lane / 4;
        u32 y[2];
#pragma unroll
        for (int n = 0; n < 2; n++)
          y[n] = load_tf32(tile + 16 * chunk_at<WIDTH>(row + n, c / 4) + 4 * (c % 4));
        multiply_tiles(sums[f], x, y[0], y[1], T());
      }
    }
  } else {
#pragma unroll
    for (int s = 0; s < COUNT / 8; s += 2) {
      const u32 x[4] = {packed(weights[s][0], weights[s][1], T()),
                        packed(weights[s][2], weights[s][3], T()),
                        packed(weights[s + 1][0], weights[s + 1][1], T()),
                        packed(weights[s + 1][2], weights[s + 1][3], T())};
#pragma unroll
      for (int f = 0; f < FEATURES / 8; f += 2) {
        if (whole_features(SIZE) % FEATURES && part + 8 * f >= whole_features(SIZE)) break;
        u32 y[4];
        load_rows<WIDTH, true, false>(y, tile, part + 8 * f, 8 * s, T());
        multiply_tiles(sums[f], x, y[0], y[1], T());
        multiply_tiles(sums[f + 1], x, y[2], y[3], T());
      }
    }
  }
}

// ---- results ----------------------------------------------------------------------------------

template <class T> void put_two(u8 *to, f32 x, f32 y, T kind) { *(u32 *)to = packed(x, y, kind); }
inline void put_two(u8 *to, f32 x, f32 y, f32) { *(Two *)to = {x, y}; }

template <int BYTES> struct alignas(BYTES) Bytes { u8 of[BYTES]; };

// Write a warp's sums, times `factor(half)` for either of a lane's rows, into a tile that nobody
// needs.
template <class T, int SIZE, int FEATURES, class Factor>
void put_sums(u8 *tile, const f32 (&sums)[FEATURES / 8][4], int row, int part, Factor factor) {
  constexpr int WIDTH = row_chunks<T>(SIZE), CHUNK = Multiplied<T>::CHUNK;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const f32 by = factor(half);
#pragma unroll
    for (int f = 0; f < FEATURES / 8; f++) {
      const int c = part + lane_column(f, 0);
      if (whole_features(SIZE) % FEATURES && c >= whole_features(SIZE)) break;
      u8 *to = tile + 16 * chunk_at<WIDTH>(row + lane_row(half), c / CHUNK);
      to += (int)sizeof(T) * (c % CHUNK);
      put_two(to, sums[f][2 * half] * by, sums[f][2 * half + 1] * by, T());
    }
  }
}

// Write the rows of a tile where `at` says that they begin.
template <int ROWS, int SIZE, int COPIED, class T, class At>
void write_rows(T *out, const u8 *tile, At at) {
  constexpr int UNITS = (SIZE + COPIED - 1) / COPIED, WIDTH = row_chunks<T>(SIZE);
  constexpr int CHUNK = Multiplied<T>::CHUNK;
  for (int t = threadIdx.x; t < ROWS * UNITS; t += blockDim.x) {
    const int row = t / UNITS, c = t % UNITS * COPIED;
    const i64 first = at(row);
    if (first < 0) continue;
    const u8 *from = tile + 16 * chunk_at<WIDTH>(row, c / CHUNK) + (int)sizeof(T) * (c % CHUNK);
    typedef Bytes<COPIED * sizeof(T)> Unit;
    *(Unit *)&out[first + c] = *(const Unit *)from;
  }
}

// ---- forward ----------------------------------------------------------------------------------

// The arguments are those of `attend` in attention.cuh.
template <int OWN, int OTHER, int SIZE, int COPIED, int PARTS, bool MASKED, bool NUMBERS, class T,
          class Score, class Near>
void attend_tensor(u8 *shared, const T *q, const T *k, const T *v, T *out, f32 *top, f32 *rest,
                   Attended at, int first, Score score, Near near) {
  constexpr int TILE = tile_bytes<T>(OTHER, SIZE), QUERIES = tile_bytes<T>(OWN, SIZE);
  constexpr int FEATURES = part_features(SIZE, PARTS);
  const f32 NOTHING = -bits_as<f32>(0x7f800000u);
  const int warp = threadIdx.x / 32, own = warp / PARTS * 16, part = warp % PARTS * FEATURES;
  const u32 tiles = shared_address(shared);
  f32 *numbers = (f32 *)(shared + QUERIES + 4 * TILE);
  const auto query_at = [&](int row) {
    return first + row < at.rows() ? at.query(first + row) : (i64)-1;
  };
  const int from = at.first_of(first, OWN), to = at.last_of(first, OWN);
  f32 most[2] = {NOTHING, NOTHING}, total[2] = {}, sums[FEATURES / 8][4] = {};
  int place = 0;
  bring_rows<OWN, SIZE, COPIED>(shared, 0, q, query_at);
  for (int round = 0; round < (MASKED ? 2 : 1); round++) {
    const auto next = [&](int start) {
      while (start < at.keys && near(from, to, start, OTHER) == (round == 1)) start += OTHER;
      return start;
    };
    const auto bring = [&](int start) {
      if (start < at.keys) {
        const auto key_at = [&](int s) {
          return start + s < at.keys ? at.key(start + s) : (i64)-1;
        };
        bring_rows<OTHER, SIZE, COPIED>(shared, QUERIES + place * 2 * TILE, k, key_at);
        bring_rows<OTHER, SIZE, COPIED>(shared, QUERIES + place * 2 * TILE + TILE, v, key_at);
      }
      commit_copies();
    };
    int start = next(0);
    bring(start);
    while (start < at.keys) {
      wait_for_copies<0>();
      __syncthreads();
      const u32 keys = tiles + QUERIES + place * 2 * TILE;
      const int after = next(start + OTHER);
      place ^= 1;
      bring(after);
      f32 s[OTHER / 8][4];
      multiply_warp_rows<T, SIZE, OTHER>(s, tiles, own, keys);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first + own + lane_row(half);
        f32 highest = most[half];
#pragma unroll
        for (int j = 0; j < OTHER / 8; j++)
#pragma unroll
          for (int n = 0; n < 2; n++) {
            f32 &x = s[j][2 * half + n];
            const int key = start + lane_column(j, n);
            bool seen = true;
            x = row < at.rows() && key < at.keys ? score(x, row, key, seen) : NOTHING;
            highest = larger(highest, x);
          }
        highest = reduce_lanes<Max, 4>(highest);
        // Where all scores are minus infinity until now, nothing is subtracted.
        const f32 base = highest == NOTHING ? 0 : highest;
        const f32 shrink = expf(most[half] - base);
        most[half] = highest;
        f32 sum = 0;
#pragma unroll
        for (int j = 0; j < OTHER / 8; j++)
#pragma unroll
          for (int n = 0; n < 2; n++) {
            f32 &x = s[j][2 * half + n];
            x = expf(x - base);
            sum += x;
          }
        total[half] = total[half] * shrink + reduce_lanes<Add, 4>(sum);
#pragma unroll
        for (int f = 0; f < FEATURES / 8; f++)
#pragma unroll
          for (int n = 0; n < 2; n++) sums[f][2 * half + n] *= shrink;
      }
      add_weighted<T, SIZE, OTHER, FEATURES>(sums, s, keys + TILE, part);
      start = after;
    }
    if (!MASKED || round == 1) break;
    if (threadIdx.x % 4 == 0 && part == 0)
      for (int half = 0; half < 2; half++) numbers[own + lane_row(half)] = most[half];
    __syncthreads();
    bool none = false;
    for (int row = 0; row < OWN && first + row < at.rows(); row++)
      none = none || saw_none(numbers[row]);
    if (!none) break;
  }
  // Some tile was visited, so that no copy is under way.
  __syncthreads();
  put_sums<T, SIZE, FEATURES>(shared, sums, own, part, [&](int half) { return 1 / total[half]; });
  if (NUMBERS && threadIdx.x % 4 == 0 && part == 0)
    for (int half = 0; half < 2; half++) {
      numbers[own + lane_row(half)] = most[half];
      numbers[OWN + own + lane_row(half)] = logf(total[half]);
    }
  __syncthreads();
  write_rows<OWN, SIZE, COPIED>(out, shared, query_at);
  if (NUMBERS) {
    for (int row = threadIdx.x; row < OWN && first + row < at.rows(); row += blockDim.x) {
      top[at.number(first + row)] = numbers[row];
      rest[at.number(first + row)] = numbers[OWN + row];
    }
  }
}

// ---- backward ---------------------------------------------------------------------------------

// The gradient of queries: their scores are computed again, tile by tile of keys.
template <int OWN, int OTHER, int SIZE, int COPIED, int PARTS, class T, class Score, class Near>
void attend_query_grad_tensor(u8 *shared, const T *q, const T *k, const T *v, const f32 *top,
                              const f32 *rest, const f32 *delta, const T *ct, T *dq, Attended at,
                              int first, f32 scale, Score score, Near near) {
  constexpr int TILE = tile_bytes<T>(OTHER, SIZE), QUERIES = tile_bytes<T>(OWN, SIZE);
  constexpr int FEATURES = part_features(SIZE, PARTS);
  const int warp = threadIdx.x / 32, own = warp / PARTS * 16, part = warp % PARTS * FEATURES;
  const u32 tiles = shared_address(shared);
  const auto query_at = [&](int row) {
    return first + row < at.rows() ? at.query(first + row) : (i64)-1;
  };
  const int from = at.first_of(first, OWN), to = at.last_of(first, OWN);
  // Where keys are not seen, the gradient is zero.
  const auto next = [&](int start) {
    while (start < at.keys && !near(from, to, start, OTHER)) start += OTHER;
    return start;
  };
  int place = 0;
  const auto bring = [&](int start) {
    if (start < at.keys) {
      const auto key_at = [&](int s) { return start + s < at.keys ? at.key(start + s) : (i64)-1; };
      bring_rows<OTHER, SIZE, COPIED>(shared, 2 * QUERIES + place * 2 * TILE, k, key_at);
      bring_rows<OTHER, SIZE, COPIED>(shared, 2 * QUERIES + place * 2 * TILE + TILE, v, key_at);
    }
    commit_copies();
  };
  bring_rows<OWN, SIZE, COPIED>(shared, 0, q, query_at);
  bring_rows<OWN, SIZE, COPIED>(shared, QUERIES, ct, query_at);
  int start = next(0);
  bring(start);
  f32 log_sums[2] = {}, deltas[2] = {}, tops[2] = {}, sums[FEATURES / 8][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first + own + lane_row(half);
    if (row >= at.rows()) continue;
    tops[half] = top[at.number(row)], log_sums[half] = rest[at.number(row)];
    deltas[half] = delta[at.number(row)];
  }
  while (start < at.keys) {
    wait_for_copies<0>();
    __syncthreads();
    const u32 keys = tiles + 2 * QUERIES + place * 2 * TILE;
    const int after = next(start + OTHER);
    place ^= 1;
    bring(after);
    f32 s[OTHER / 8][4], moved[OTHER / 8][4];
    multiply_warp_rows<T, SIZE, OTHER>(s, tiles, own, keys);
    multiply_warp_rows<T, SIZE, OTHER>(moved, tiles + QUERIES, own, keys + TILE);
#pragma unroll
    for (int j = 0; j < OTHER / 8; j++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int row = first + own + lane_row(n / 2), key = start + lane_column(j, n % 2);
        f32 slope = 0;
        if (row < at.rows() && key < at.keys) {
          bool seen = true;
          const f32 weight = expf(score(s[j][n], row, key, seen) - tops[n / 2] - log_sums[n / 2]);
          slope = seen ? weight * (moved[j][n] - deltas[n / 2]) * scale : 0;
        }
        s[j][n] = slope;
      }
    add_weighted<T, SIZE, OTHER, FEATURES>(sums, s, keys, part);
    start = after;
  }
  // Where no tile was visited, the first copies may be under way.
  wait_for_copies<0>();
  __syncthreads();
  put_sums<T, SIZE, FEATURES>(shared, sums, own, part, [](int) { return 1.0f; });
  __syncthreads();
  write_rows<OWN, SIZE, COPIED>(dq, shared, query_at);
}

// The gradients of keys and values: a block has some keys, and walks over the queries.
template <int OWN, int OTHER, int SIZE, int COPIED, int PARTS, bool MASKED, class T, class Score,
          class Near>
void attend_key_grad_tensor(u8 *shared, const T *q, const T *k, const T *v, const f32 *top,
                            const f32 *rest, const f32 *delta, const T *ct, T *dk, T *dv,
                            Attended at, int first, f32 scale, Score score, Near near) {
  constexpr int TILE = tile_bytes<T>(OTHER, SIZE), KEYS = tile_bytes<T>(OWN, SIZE);
  // Queries, their cotangents and numbers.
  constexpr int STAGE = 2 * TILE + 3 * 4 * OTHER, FEATURES = part_features(SIZE, PARTS);
  const int warp = threadIdx.x / 32, own = warp / PARTS * 16, part = warp % PARTS * FEATURES;
  const u32 tiles = shared_address(shared);
  const auto key_at = [&](int s) { return first + s < at.keys ? at.key(first + s) : (i64)-1; };
  // Whether one of the queries sees nothing: then it weighs all values.
  const auto some_see_none = [&](int start) {
    int none = 0;
    for (int row = threadIdx.x % 32; row < OTHER && start + row < at.rows(); row += 32)
      none |= saw_none(top[at.number(start + row)]);
    return reduce_lanes<Max, 32>(none) != 0;
  };
  const auto next = [&](int start) {
    while (start < at.rows()) {
      if (near(at.first_of(start, OTHER), at.last_of(start, OTHER), first, OWN)) break;
      if (MASKED && some_see_none(start)) break;
      start += OTHER;
    }
    return start;
  };
  int place = 0;
  const auto bring = [&](int start) {
    if (start < at.rows()) {
      const auto query_at = [&](int row) {
        return start + row < at.rows() ? at.query(start + row) : (i64)-1;
      };
      const auto number_at = [&](int row) {
        return start + row < at.rows() ? at.number(start + row) : (i64)-1;
      };
      const int stage = 2 * KEYS + place * STAGE;
      bring_rows<OTHER, SIZE, COPIED>(shared, stage, q, query_at);
      bring_rows<OTHER, SIZE, COPIED>(shared, stage + TILE, ct, query_at);
      bring_row_numbers<OTHER>(shared, stage + 2 * TILE, top, number_at);
      bring_row_numbers<OTHER>(shared, stage + 2 * TILE + 4 * OTHER, rest, number_at);
      bring_row_numbers<OTHER>(shared, stage + 2 * TILE + 8 * OTHER, delta, number_at);
    }
    commit_copies();
  };
  bring_rows<OWN, SIZE, COPIED>(shared, 0, k, key_at);
  bring_rows<OWN, SIZE, COPIED>(shared, KEYS, v, key_at);
  int start = next(0);
  bring(start);
  f32 dkeys[FEATURES / 8][4] = {}, dvalues[FEATURES / 8][4] = {};
  while (start < at.rows()) {
    wait_for_copies<0>();
    __syncthreads();
    const int stage = 2 * KEYS + place * STAGE;
    const f32 *tops = (const f32 *)(shared + stage + 2 * TILE), *rests = tops + OTHER;
    const f32 *deltas = rests + OTHER;
    const int after = next(start + OTHER);
    place ^= 1;
    bring(after);
    f32 s[OTHER / 8][4], moved[OTHER / 8][4];
    multiply_warp_rows<T, SIZE, OTHER>(s, tiles, own, tiles + stage);
    multiply_warp_rows<T, SIZE, OTHER>(moved, tiles + KEYS, own, tiles + stage + TILE);
#pragma unroll
    for (int j = 0; j < OTHER / 8; j++)
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int other = lane_column(j, n % 2);
        const int row = start + other, key = first + own + lane_row(n / 2);
        f32 weight = 0, slope = 0;
        if (row < at.rows() && key < at.keys) {
          bool seen = true;
          weight = expf(score(s[j][n], row, key, seen) - tops[other] - rests[other]);
          slope = seen ? weight * (moved[j][n] - deltas[other]) * scale : 0;
        }
        s[j][n] = slope, moved[j][n] = weight;
      }
    add_weighted<T, SIZE, OTHER, FEATURES>(dkeys, s, tiles + stage, part);
    add_weighted<T, SIZE, OTHER, FEATURES>(dvalues, moved, tiles + stage + TILE, part);
    start = after;
  }
  // Where no tile was visited, the first copies may be under way.
  wait_for_copies<0>();
  __syncthreads();
  put_sums<T, SIZE, FEATURES>(shared, dkeys, own, part, [](int) { return 1.0f; });
  put_sums<T, SIZE, FEATURES>(shared + KEYS, dvalues, own, part, [](int) { return 1.0f; });
  __syncthreads();
  write_rows<OWN, SIZE, COPIED>(dk, shared, key_at);
  write_rows<OWN, SIZE, COPIED>(dv, shared + KEYS, key_at);
}
