// Products of tiles on tensor cores: copies that run beside the arithmetic, and what a warp computes
// together. Elements have 16 bits, or are f32 that are rounded to TF32; sums are f32.
//
// A slab lies in shared memory as rows of WIDTH chunks of 16 bytes. A row's chunks are exchanged so
// that eight neighbours of a row, and the same chunk of eight rows, lie in different banks. Where
// lanes read elements of f32 one by one, there are two more chunks behind each row instead.

template <int WIDTH> int chunk_at(int row, int chunk) {
  const int turns = WIDTH < 8 ? row / (8 / WIDTH) % WIDTH : row % 8;
  return row * WIDTH + (chunk ^ turns);
}

inline u32 shared_address(const void *place) { return (u32)__cvta_generic_to_shared(place); }

// Begin a copy from global memory: `valid` bytes, then zeros. Groups of copies land in order.
template <int BYTES> void copy_async(u32 to, const void *from, int valid) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to), "l"(from), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(to), "l"(from), "n"(BYTES), "r"(valid) : "memory");
}
inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait for the thread's own copies, but for its last `LATER` groups.
template <int LATER> void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LATER) : "memory");
}

// Four tiles of 8 x 8: lanes 8 k to 8 k + 7 have the addresses of the rows of tile k.
template <bool TRANSPOSED> void load_tiles(u32 (&tiles)[4], u32 row) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(row) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(row) : "memory");
}

// Two neighbours in one access: the compiler may take two, which go to the same banks.
inline void store_two(u32 at, f32 x, f32 y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(at), "f"(x), "f"(y) : "memory");
}

// 16 rows of A, or 16 columns of B, by 16 along the depth, from the place (side, depth) of a slab
// on. Rows of the slab lie along the depth, or ALONG_SIDE. Tiles 0 and 1 are neighbours along the
// side in A (LEFT), and along the depth in B.
template <int WIDTH, bool ALONG_SIDE, bool LEFT>
void load_fragment(u32 (&tiles)[4], u32 slab, int side, int depth) {
  const int lane = threadIdx.x % 32, tile = lane / 8;
  side += 8 * (LEFT ? tile % 2 : tile / 2);
  depth += 8 * (LEFT ? tile / 2 : tile % 2);
  const int at = ALONG_SIDE ? chunk_at<WIDTH>(depth + lane % 8, side / 8)
                            : chunk_at<WIDTH>(side + lane % 8, depth / 8);
  load_tiles<ALONG_SIDE>(tiles, slab + 16 * at);
}

// The same of f32 by 8 along the depth, rounded to TF32: tiles are of 8 x 4 elements. `ldmatrix` sees
// an element as two neighbours of a row, so it has no transpose of them.
template <int WIDTH, bool ALONG_SIDE, bool LEFT>
void load_tf32_fragment(u32 (&tiles)[4], u32 slab, int side, int depth) {
  const int lane = threadIdx.x % 32;
  if (ALONG_SIDE) {
#pragma unroll
    for (int tile = 0; tile < 4; tile++) {
      const int i = side + 8 * (LEFT ? tile % 2 : tile / 2) + lane / 4;
      const int k = depth + 4 * (LEFT ? tile / 2 : tile % 2) + lane % 4;
      const u32 at = slab + 16 * (WIDTH + 2) * k + 4 * i;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(tiles[tile]) : "r"(at) : "memory");
    }
  } else {
    const int tile = lane / 8;
    side += 8 * (LEFT ? tile % 2 : tile / 2);
    depth += 4 * (LEFT ? tile / 2 : tile % 2);
    load_tiles<false>(tiles, slab + 16 * chunk_at<WIDTH>(side + lane % 8, depth / 4));
  }
#pragma unroll
  for (int tile = 0; tile < 4; tile++)
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(tiles[tile]) : "f"(__int_as_float(tiles[tile])));
}

// Add 16 x 16 of A times 16 x 8 of B to 16 x 8 sums. Sum k of a lane is in row
// lane / 4 + 8 (k / 2) and column 2 (lane % 4) + k % 2.
inline void multiply_tiles(f32 (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void multiply_tiles(f32 (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same of 16 x 8 of A and 8 x 8 of B in TF32.
inline void multiply_tiles(f32 (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1, f32) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
