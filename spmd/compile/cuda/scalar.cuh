// The scalar world of rendered kernels: element types, and the operations of kernel/ops.py with the
// meaning that is written there. Compiled by NVRTC with no header of CUDA (functions are device
// functions by option -default-device), and by any C++17 compiler behind the emulator's header.

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// The narrow floats are storage only: values are carried in f32, as the IR says.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

template <class T> struct alignas(2 * sizeof(T)) complex_of { T re, im; };
typedef complex_of<f32> c64;
typedef complex_of<f64> c128;

template <class To, class From> To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  union { From from; To to; } box;
  box.from = value;
  return box.to;
}

// ---- the narrow floats ------------------------------------------------------------------------

#ifdef __CUDACC__
inline u16 f16_bits(f32 x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
inline f32 f16_value(u16 bits) {
  f32 x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
#endif

// Nearest even; the bump could carry a NaN into infinity, so a NaN keeps its sign and gets quiet.
inline u16 bf16_bits(f32 x) {
  const u32 bits = bits_as<u32>(x), high = bits >> 16;
  return (u16)(x != x ? high | 0x40 : (bits + 0x7fff + (high & 1)) >> 16);
}
inline f32 bf16_value(u16 bits) { return bits_as<f32>((u32)bits << 16); }

inline f32 load(const f16 *place) { return f16_value(place->bits); }
inline f32 load(const bf16 *place) { return bf16_value(place->bits); }
inline void store(f16 *place, f32 x) { place->bits = f16_bits(x); }
inline void store(bf16 *place, f32 x) { place->bits = bf16_bits(x); }
template <class T> T load(const T *place) { return *place; }
template <class T> void store(T *place, T x) { *place = x; }

inline f32 round_f16(f32 x) { return f16_value(f16_bits(x)); }
inline f32 round_bf16(f32 x) { return bf16_value(bf16_bits(x)); }

// Narrow to f32 so that a second rounding, to 16 bits, is as good as one: truncate, and set the last
// bit if something was lost.
inline f32 round_to_odd(f64 x) {
  const f32 near = (f32)x;
  if ((f64)near == x || x != x || fabsf(near) == bits_as<f32>(0x7f800000u)) return near;
  const u32 bits = bits_as<u32>(near) - (fabs((f64)near) > fabs(x) ? 1u : 0u);
  return bits_as<f32>(bits | 1u);
}

// ---- integers: they wrap, and nothing is undefined ----------------------------------------------

template <class T> struct integer;
template <> struct integer<i8> { typedef u32 wide; typedef i8 whole; typedef u8 natural; };
template <> struct integer<u8> { typedef u32 wide; typedef i8 whole; typedef u8 natural; };
template <> struct integer<i16> { typedef u32 wide; typedef i16 whole; typedef u16 natural; };
template <> struct integer<u16> { typedef u32 wide; typedef i16 whole; typedef u16 natural; };
template <> struct integer<i32> { typedef u32 wide; typedef i32 whole; typedef u32 natural; };
template <> struct integer<u32> { typedef u32 wide; typedef i32 whole; typedef u32 natural; };
template <> struct integer<i64> { typedef u64 wide; typedef i64 whole; typedef u64 natural; };
template <> struct integer<u64> { typedef u64 wide; typedef i64 whole; typedef u64 natural; };

template <class T> constexpr int bits_of() { return 8 * sizeof(T); }
template <class T> constexpr bool is_signed() { return (T)-1 < (T)0; }
template <class T> constexpr T lowest() {
  return is_signed<T>() ? (T)((typename integer<T>::natural)1 << (bits_of<T>() - 1)) : (T)0;
}
template <class T> constexpr T highest() { return (T)~lowest<T>(); }

template <class T> T add(T x, T y) {
  typedef typename integer<T>::wide wide;
  return (T)((wide)x + (wide)y);
}
template <class T> T sub(T x, T y) {
  typedef typename integer<T>::wide wide;
  return (T)((wide)x - (wide)y);
}
template <class T> T mul(T x, T y) {
  typedef typename integer<T>::wide wide;
  return (T)((wide)x * (wide)y);
}
// The products of the four bytes of two words, added to a sum.
inline u32 dot_of_i8(u32 x, u32 y, u32 total) {
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(total) : "r"(x), "r"(y));
  return total;
}
inline u32 dot_of_u8(u32 x, u32 y, u32 total) {
  asm("dp4a.u32.u32 %0, %1, %2, %0;" : "+r"(total) : "r"(x), "r"(y));
  return total;
}
template <class T> T neg(T x) { return sub((T)0, x); }
template <class T> T div(T x, T y) {
  if (y == 0) return (T)~(T)0;
  if (is_signed<T>() && y == (T)-1) return neg(x);
  return (T)(x / y);
}
template <class T> T rem(T x, T y) {
  if (y == 0) return x;
  if (is_signed<T>() && y == (T)-1) return 0;
  return (T)(x % y);
}
template <class T> T absolute(T x) { return is_signed<T>() && x < 0 ? neg(x) : x; }
template <class T> T sign(T x) { return (T)((x > 0) - (is_signed<T>() && x < 0)); }
template <class T> T shl(T x, T by) {
  typedef typename integer<T>::natural natural;
  typedef typename integer<T>::wide wide;
  return (natural)by < bits_of<T>() ? (T)((wide)(natural)x << (natural)by) : (T)0;
}
template <class T> T shr_logical(T x, T by) {
  typedef typename integer<T>::natural natural;
  return (natural)by < bits_of<T>() ? (T)((natural)x >> (natural)by) : (T)0;
}
template <class T> T shr_arith(T x, T by) {
  typedef typename integer<T>::natural natural;
  typedef typename integer<T>::whole whole;
  const natural most = bits_of<T>() - 1;
  return (T)((whole)x >> ((natural)by < most ? (natural)by : most));
}
template <class T> T clz(T x) {
  typedef typename integer<T>::natural natural;
  if (sizeof(T) == 8) return (T)__clzll((i64)x);
  return (T)(__clz((i32)(u32)(natural)x) - (32 - bits_of<T>()));
}
template <class T> T popcount(T x) {
  typedef typename integer<T>::natural natural;
  return (T)(sizeof(T) == 8 ? __popcll((u64)x) : __popc((u32)(natural)x));
}

// Truncate to an integer: what is too large gives the extreme, NaN gives 0.
template <class T, class Float> T saturate(Float x) {
  const Float above = (Float)(1ull << (bits_of<T>() - 1 - is_signed<T>())) * 2;
  if (x != x) return 0;
  if (x >= above) return highest<T>();
  return x > (is_signed<T>() ? -above : (Float)0) ? (T)x : lowest<T>();
}

// ---- floats ------------------------------------------------------------------------------------

inline f32 add(f32 x, f32 y) { return x + y; }
inline f64 add(f64 x, f64 y) { return x + y; }
inline f32 mul(f32 x, f32 y) { return x * y; }
inline f64 mul(f64 x, f64 y) { return x * y; }
inline f32 sign(f32 x) { return x > 0 ? 1 : x < 0 ? -1 : x; }
inline f64 sign(f64 x) { return x > 0 ? 1 : x < 0 ? -1 : x; }

// NaN if either side is: an unordered comparison chooses y, and a NaN in x is put back.
template <class T> T larger(T x, T y) { return x > y || x != x ? x : y; }
template <class T> T smaller(T x, T y) { return x < y || x != x ? x : y; }

template <class T> T bit_and(T x, T y) { return (T)(x & y); }
template <class T> T bit_or(T x, T y) { return (T)(x | y); }
template <class T> T bit_xor(T x, T y) { return (T)(x ^ y); }

// A counter of two words encrypted with a key of two words: the second word is the high one.
inline u64 threefry2x32(u32 k0, u32 k1, u32 x0, u32 x1) {
  const u32 rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const u32 keys[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bdau};
  x0 += keys[0], x1 += keys[1];
#pragma unroll
  for (u32 group = 0; group < 5; ++group) {
#pragma unroll
    for (u32 round = 0; round < 4; ++round) {
      const u32 by = rotations[group % 2][round];
      x0 += x1;
      x1 = x0 ^ (x1 << by | x1 >> (32 - by));
    }
    x0 += keys[(group + 1) % 3], x1 += keys[(group + 2) % 3] + group + 1;
  }
  return (u64)x1 << 32 | x0;
}

inline bool is_finite(f32 x) { return fabsf(x) < bits_as<f32>(0x7f800000u); }
inline bool is_finite(f64 x) { return fabs(x) < bits_as<f64>(0x7ff0000000000000ull); }

inline f64 logistic(f64 x) { return 1.0 / (1.0 + exp(-x)); }
inline f32 logistic(f32 x) { return 1.0f / (1.0f + expf(-x)); }

// Infinite at the poles and at both infinities.
inline f32 log_gamma(f32 x) { return x == -bits_as<f32>(0x7f800000u) ? -x : lgammaf(x); }
inline f64 log_gamma(f64 x) { return x == -bits_as<f64>(0x7ff0000000000000ull) ? -x : lgamma(x); }

// The derivative of log_gamma: reflection below 1/2, recurrence up to 10, then Stirling's series
// (Abramowitz and Stegun 6.3.7, 6.3.5, 6.3.18).
inline f64 digamma(f64 x) {
  const f64 pi = 3.14159265358979323846, nan = bits_as<f64>(0x7ff8000000000000ull);
  if (x <= 0 && x == floor(x)) return nan;
  f64 result = 0;
  if (x < 0.5) {
    // The angle is reduced first: pi times a large number has lost its fraction.
    result = -pi / tan(pi * (x - rint(x)));
    x = 1 - x;
  }
  while (x < 10) {
    result -= 1 / x;
    x += 1;
  }
  const f64 r = 1 / (x * x);
  const f64 tail = r * (1 / 12.0 - r * (1 / 120.0 - r * (1 / 252.0 - r * (1 / 240.0 -
                   r * (1 / 132.0 - r * (691 / 32760.0 - r / 12))))));
  return result + log(x) - 0.5 / x - tail;
}
inline f32 digamma(f32 x) { return (f32)digamma((f64)x); }

// ---- complex numbers: products are rounded one by one, so that z * conj(z) is real ---------------

inline f32 product(f32 x, f32 y) { return __fmul_rn(x, y); }
inline f64 product(f64 x, f64 y) { return __dmul_rn(x, y); }
inline f32 root(f32 x) { return sqrtf(x); }
inline f64 root(f64 x) { return sqrt(x); }
inline f32 magnitude(f32 x) { return fabsf(x); }
inline f64 magnitude(f64 x) { return fabs(x); }
inline f32 exponential(f32 x) { return expf(x); }
inline f64 exponential(f64 x) { return exp(x); }
inline f32 logarithm(f32 x) { return logf(x); }
inline f64 logarithm(f64 x) { return log(x); }
inline f32 cosine(f32 x) { return cosf(x); }
inline f64 cosine(f64 x) { return cos(x); }
inline f32 sine(f32 x) { return sinf(x); }
inline f64 sine(f64 x) { return sin(x); }
inline f32 angle(f32 y, f32 x) { return atan2f(y, x); }
inline f64 angle(f64 y, f64 x) { return atan2(y, x); }
inline f32 with_sign_of(f32 x, f32 y) { return copysignf(x, y); }
inline f64 with_sign_of(f64 x, f64 y) { return copysign(x, y); }
inline f32 infinity(f32) { return bits_as<f32>(0x7f800000u); }
inline f64 infinity(f64) { return bits_as<f64>(0x7ff0000000000000ull); }

template <class T> complex_of<T> add(complex_of<T> x, complex_of<T> y) {
  return {x.re + y.re, x.im + y.im};
}
template <class T> complex_of<T> sub(complex_of<T> x, complex_of<T> y) {
  return {x.re - y.re, x.im - y.im};
}
template <class T> complex_of<T> mul(complex_of<T> x, complex_of<T> y) {
  return {product(x.re, y.re) - product(x.im, y.im), product(x.re, y.im) + product(x.im, y.re)};
}
// Smith's quotient: scale by the larger part of the divisor, so that nothing overflows early.
template <class T> complex_of<T> div(complex_of<T> x, complex_of<T> y) {
  const bool turned = magnitude(y.re) < magnitude(y.im);
  const T large = turned ? y.im : y.re, small = turned ? y.re : y.im;
  const T ratio = large == 0 ? small : small / large;  // 0/0 would spoil x/0
  const T scale = large + product(small, ratio);
  const T first = turned ? x.im : x.re, second = turned ? x.re : x.im;
  const T im = second - product(first, ratio);
  return {(first + product(second, ratio)) / scale, (turned ? -im : im) / scale};
}
template <class T> complex_of<T> neg(complex_of<T> x) { return {-x.re, -x.im}; }
template <class T> complex_of<T> conjugate(complex_of<T> x) { return {x.re, -x.im}; }
template <class T> bool equal(complex_of<T> x, complex_of<T> y) {
  return x.re == y.re && x.im == y.im;
}
// Without overflow; infinite if a part is, even beside a NaN.
template <class T> T modulus(complex_of<T> x) {
  const T a = magnitude(x.re), b = magnitude(x.im), infinite = infinity(a);
  if (a == infinite || b == infinite) return infinite;
  const T large = a < b ? b : a, small = a < b ? a : b;
  if (large == 0) return small;
  const T ratio = small / large;
  return large * root(1 + ratio * ratio);
}
// A real argument has a real exponential, infinite or not.
template <class T> complex_of<T> exponential(complex_of<T> x) {
  const T length = exponential(x.re);
  if (x.im == 0) return {length, x.im};
  // Zero and infinite lengths stay what they are in a direction that is not a number.
  const bool lost = magnitude(x.re) == infinity(x.re) && x.im - x.im != 0;
  if (lost) return {length, x.re < 0 ? length : x.im - x.im};
  return {length * cosine(x.im), length * sine(x.im)};
}
template <class T> complex_of<T> logarithm(complex_of<T> x) {
  return {logarithm(modulus(x)), angle(x.im, x.re)};
}
// The root with a non-negative real part; the branch cut takes the sign of im.
template <class T> complex_of<T> root(complex_of<T> x) {
  const T infinite = infinity(x.re), half = (T)0.5;
  if (magnitude(x.im) == infinite) return {infinite, x.im};
  // Halved before adding: |re| + |z| may overflow.
  const T t = root(magnitude(x.re) * half + modulus(x) * half);
  const T other = t == 0 ? 0 : magnitude(x.im) * half / t;
  const T re = x.re >= 0 ? t : other, im = x.re >= 0 ? other : t;
  return {re, with_sign_of(im, x.im)};
}

// x to a constant power, by repeated squaring; `one` carries the type.
template <class T> T power(T x, u32 exponent, T one) {
  T result = one;
  for (bool first = true; exponent; exponent >>= 1) {
    if (exponent & 1) {
      result = first ? x : mul(result, x);
      first = false;
    }
    if (exponent > 1) x = mul(x, x);
  }
  return result;
}
