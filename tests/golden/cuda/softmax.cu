// kernel(a0: f32[5000] in, a1: f32[5000] out) outer (5) inner (1000) lanes dim 1 row buffers f32, f32
// row:
//   %0 = f32 load a0[1000*d0 + d1]
//   store row 1 <- %0
//   %1 = f32 reduce max %0
// row:
//   %2 = f32 load row 1
//   %3 = f32 sub %2 %1
//   %4 = f32 exp %3
//   store row 0 <- %4
//   %5 = f32 reduce add %4
// row:
//   %6 = f32 load row 0
//   %7 = f32 div %6 %5
//   store a1[1000*d0 + d1] <- %7
extern "C" __global__ void __launch_bounds__(256)
kernel_a30f22465884722c936358e9c93114b3(const f32 *a0, f32 *a1) {
  extern __shared__ unsigned char shared[];
  // Threads for a row: 256; rows for a block: 1.
  const int member = threadIdx.x;
  const int point = blockIdx.x * 1 + threadIdx.y;
  // Row buffers live in registers.
  f32 row0[4];
  f32 row1[4];
  // for each element of the row
  f32 total0 = bits_as<f32>(0xff800000u);
  #pragma unroll
  for (int item = 0; item < 4; item++) {
    const int element = item * 256 + member;
    if (element >= 1000) break;
    const f32 v1 = a0[point * 1000 + element];
    row1[item] = v1;
    total0 = Max::apply(total0, v1);
  }
  total0 = reduce_rows<Max, 256>(total0, (f32 *)shared);
  // for each element of the row
  f32 total2 = 0.0f;
  #pragma unroll
  for (int item = 0; item < 4; item++) {
    const int element = item * 256 + member;
    if (element >= 1000) break;
    const f32 v3 = row1[item];
    const f32 v4 = v3 - total0;
    const f32 v5 = expf(v4);
    row0[item] = v5;
    total2 = Add::apply(total2, v5);
  }
  total2 = reduce_rows<Add, 256>(total2, (f32 *)shared);
  // for each element of the row
  #pragma unroll
  for (int item = 0; item < 4; item++) {
    const int element = item * 256 + member;
    if (element >= 1000) break;
    const f32 v6 = row0[item];
    const f32 v7 = v6 / total2;
    a1[point * 1000 + element] = v7;
  }
}
