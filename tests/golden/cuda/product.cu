// product 100x60x70, then
// kernel(a0: f32[6000] in, a1: bf16[6000] out) outer (100) inner (60)
// row:
//   %0 = f32 load a0[60*d0 + d1]
//   %1 = bf16 convert %0
//   store a1[60*d0 + d1] <- %1
extern "C" __global__ void __launch_bounds__(256)
kernel_795c31d65b49c8b11b7a9915a52f2d98(const f32 *a, const f32 *b, bf16 *a1) {
  extern __shared__ unsigned char shared[];
  // 32 x 32 of C a block, 2 x 2 sums a thread.
  f32 *left = (f32 *)shared, *right = left + 544;
  const int thread = threadIdx.y * 16 + threadIdx.x;
  const int tile = blockIdx.x;
  const int row = tile / 2 * 32, column = tile % 2 * 32;
  f32 sums[2][2] = {};
  for (int first = 0; first < 70; first += 16) {
    #pragma unroll
    for (int t = thread; t < 512; t += 256) {
      const int i = t / 16, k = t % 16;
      left[k * 34 + i] = row + i < 100 && first + k < 70 ? load(&a[(row + i) * 70 + (first + k)]) : 0;
    }
    #pragma unroll
    for (int t = thread; t < 512; t += 256) {
      const int i = t / 16, k = t % 16;
      right[k * 34 + i] = column + i < 60 && first + k < 70 ? load(&b[(column + i) * 70 + (first + k)]) : 0;
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 16; k++) {
      f32 x[2], y[2];
      #pragma unroll
      for (int i = 0; i < 2; i++) x[i] = left[k * 34 + threadIdx.y + 16 * i];
      #pragma unroll
      for (int i = 0; i < 2; i++) y[i] = right[k * 34 + threadIdx.x + 16 * i];
      #pragma unroll
      for (int i = 0; i < 2; i++) {
        #pragma unroll
        for (int j = 0; j < 2; j++) sums[i][j] += x[i] * y[j];
      }
    }
    __syncthreads();
  }
  #pragma unroll
  for (int i = 0; i < 2; i++) {
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const int d0 = row + threadIdx.y + 16 * i;
      const int d1 = column + threadIdx.x + 16 * j;
      if (d0 >= 100 || d1 >= 60) continue;
      const f32 v0 = sums[i][j];
      const f32 v1 = round_bf16(v0);
      store(&a1[d0 * 60 + d1], v1);
    }
  }
}
