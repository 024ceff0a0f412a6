// The CUDA that rendered kernels use, on a CPU: the same source text, compiled by a C++ compiler.
//
// Each CUDA thread is a fiber. The order is depth first by warp: lanes of a warp run one after the
// other up to their next meeting, a warp goes on alone as far as it can, and only when all its lanes
// wait for the block does the next warp start. A missing __syncthreads is found because the first
// warps are then far ahead of the last. Shared memory is poisoned before each block.

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

// What the source declares as `extern __shared__ unsigned char shared[]`.
namespace emulated {
extern "C" { alignas(16) unsigned char shared[256 * 1024]; }
}

namespace emulator {

enum State { RUNNING, AT_SHUFFLE, AT_BARRIER, ENDED };
enum { MOST_THREADS = 1024, WARP = 32, STACK = 64 * 1024, FENCE = 1024 };

struct Dim { unsigned x, y; };

struct Fiber {
  jmp_buf where;
  ucontext_t start;
  bool started;
  State state;
  unsigned meetings;  // shuffles so far: tells which of two slots to use
};

static Fiber fibers[MOST_THREADS];
static unsigned words[MOST_THREADS][2];
static jmp_buf scheduler;
static int current;
static Dim thread_index, block_index, block_size;
static void (*kernel_call)(void **);
static void **kernel_arguments;
static char *failure;

static void enter(int fiber) {
  current = fiber;
  thread_index = Dim{fiber % block_size.x, fiber / block_size.x};
}

// Give the processor back to the scheduler, which continues here when the meeting has taken place.
static void wait_at(State state) {
  const int fiber = current;
  fibers[fiber].state = state;
  if (!_setjmp(fibers[fiber].where)) _longjmp(scheduler, 1);
  enter(fiber);
}

static void live() {
  for (;;) {
    kernel_call(kernel_arguments);
    wait_at(ENDED);
  }
}

static void resume(int fiber) {
  Fiber &it = fibers[fiber];
  if (_setjmp(scheduler)) return;
  it.state = RUNNING;
  enter(fiber);
  if (it.started) _longjmp(it.where, 1);
  it.started = true;
  getcontext(&it.start);
  it.start.uc_stack.ss_sp = malloc(STACK);
  it.start.uc_stack.ss_size = STACK;
  it.start.uc_link = 0;
  makecontext(&it.start, live, 0);
  setcontext(&it.start);
}

static bool fail(const char *what, int thread) {
  snprintf(failure, 200, "%s: thread (%u, %u) of block %u", what, thread % block_size.x,
           thread / block_size.x, block_index.x);
  return false;
}

// Run one warp until all its lanes wait for the block or have ended.
static bool run_warp(int first, int threads) {
  const int last = first + WARP < threads ? first + WARP : threads;
  for (;;) {
    for (int k = first; k < last; k++)
      if (fibers[k].state == RUNNING) resume(k);
    int shuffling = 0;
    for (int k = first; k < last; k++) shuffling += fibers[k].state == AT_SHUFFLE;
    if (!shuffling) return true;
    for (int k = first; k < last; k++) {
      if (fibers[k].state != AT_SHUFFLE) return fail("a lane is missing at a shuffle", k);
      fibers[k].state = RUNNING;
    }
  }
}

static bool run_block(int threads) {
  for (int k = 0; k < threads; k++) fibers[k].state = RUNNING;
  for (;;) {
    for (int first = 0; first < threads; first += WARP)
      if (!run_warp(first, threads)) return false;
    int waiting = 0;
    for (int k = 0; k < threads; k++) waiting += fibers[k].state == AT_BARRIER;
    if (!waiting) return true;
    for (int k = 0; k < threads; k++) {
      if (fibers[k].state != AT_BARRIER) return fail("a thread ended before __syncthreads", k);
      fibers[k].state = RUNNING;
    }
  }
}

static void run_plainly(int threads) {
  for (int k = 0; k < threads; k++) {
    enter(k);
    kernel_call(kernel_arguments);
  }
}

static int launch(int grid, Dim block, int shared, int barriers, char *message) {
  const int threads = block.x * block.y;
  block_size = block;
  failure = message;
  if (shared + FENCE > (int)sizeof emulated::shared || threads > MOST_THREADS)
    return fail("too large a block", 0), 1;
  for (int number = 0; number < grid; number++) {
    block_index = Dim{(unsigned)number, 0};
    memset(emulated::shared, 0xff, shared + FENCE);  // NaN in every float type
    if (!barriers) run_plainly(threads);
    else if (!run_block(threads)) return 1;
    for (int byte = shared; byte < shared + FENCE; byte++)
      if (emulated::shared[byte] != 0xff) return fail("a write behind the shared memory", 0), 1;
  }
  return 0;
}

// Calling a function of any pointers with an array of pointers.
template <int... I> struct Numbers {};
template <int N, int... I> struct Count : Count<N - 1, N - 1, I...> {};
template <int... I> struct Count<0, I...> { typedef Numbers<I...> type; };
template <class... A, int... I> void call(void (*f)(A...), void **p, Numbers<I...>) { f((A)p[I]...); }
template <class... A> void call(void (*f)(A...), void **p) {
  call(f, p, typename Count<sizeof...(A)>::type());
}

// ---- what the source calls ------------------------------------------------------------------------

static void meet_block() { wait_at(AT_BARRIER); }

static unsigned exchange(unsigned value, int lane) {
  const int me = current;
  const unsigned side = fibers[me].meetings++ % 2;
  words[me][side] = value;
  wait_at(AT_SHUFFLE);
  return words[me / WARP * WARP + lane][side];
}

}  // namespace emulator

#define __global__
#define __shared__
#define __launch_bounds__(threads)
#define threadIdx (emulator::thread_index)
#define blockIdx (emulator::block_index)
#define blockDim (emulator::block_size)
#define __syncthreads emulator::meet_block

static inline unsigned __shfl_xor_sync(unsigned, unsigned value, int distance) {
  return emulator::exchange(value, emulator::current % emulator::WARP ^ distance);
}
static inline unsigned __shfl_up_sync(unsigned, unsigned value, int distance) {
  const int lane = emulator::current % emulator::WARP;
  return emulator::exchange(value, lane < distance ? lane : lane - distance);
}
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }

// Newton's method on erf, or on erfc near the ends, from Giles' logarithmic estimate.
static inline double erfinv(double x) {
  const double size = fabs(x);
  if (!(size < 1)) return size == 1 ? copysign(HUGE_VAL, x) : NAN;
  const double a = log1p(-size * size), b = 4.3307467508 + a / 2;
  double y = sqrt(sqrt(b * b - a / 0.147) - b);
  for (int k = 0; k < 8; k++) {
    const double off = size < 0.5 ? erf(y) - size : (1 - size) - erfc(y);
    y -= off / (1.1283791670955126 * exp(-y * y));
  }
  return copysign(y, x);
}
static inline float erfinvf(float x) { return (float)erfinv(x); }

// f16 to and from f32 by the bits: rounding to nearest even, denormals by an addition that rounds.
static inline unsigned short f16_bits(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  const unsigned sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return (unsigned short)(sign | 0x7e00 | (size >> 13 & 0x1ff));
  if (size >= 0x47800000) return (unsigned short)(sign | 0x7c00);
  if (size >= 0x38800000)
    return (unsigned short)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
  const float moved = fabsf(x) + 0.5f;  // the unit of f16's denormals is the unit of floats here
  memcpy(&bits, &moved, 4);
  return (unsigned short)(sign | (bits - 0x3f000000));
}
static inline float f16_value(unsigned short half) {
  const unsigned sign = (half & 0x8000u) << 16, size = half & 0x7fff;
  unsigned bits = sign | (size << 13) + 0x38000000;
  if (size >= 0x7c00) bits = sign | 0x7f800000 | size << 13;
  float value;
  memcpy(&value, &bits, 4);
  return size < 0x400 ? copysignf(size * 0x1p-24f, half & 0x8000 ? -1.0f : 1.0f) : value;
}

#define ENTRY(name)                                                                              \
  static void call_##name(void **p) { emulator::call(name, p); }                                 \
  extern "C" int emulate_##name(int grid, int x, int y, int bytes, int barriers, void **p,        \
                                char *message) {                                                 \
    emulator::kernel_call = call_##name;                                                         \
    emulator::kernel_arguments = p;                                                              \
    return emulator::launch(grid, {(unsigned)x, (unsigned)y}, bytes, barriers, message);         \
  }
