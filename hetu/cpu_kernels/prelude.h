// What every compiled function may use. An operator's expression (`code=`) is the same text in CUDA, where functions
// overload; in C they choose by the type of their argument, so that no float is computed as a double.

#include <math.h>
#include <stdbool.h>

typedef union {  // one word of a block of arguments
    void* p;
    long long n;
    double x;
} Word;

// Numbers of one place in memory are read before any of them is written, so neighbors can be computed together.
#if defined(__clang__)
#define EACH _Pragma("clang loop vectorize(assume_safety)")
#else
#define EACH _Pragma("GCC ivdep")
#endif

// -- functions of floats ------------------------------------------------------------------------------------------------
// Polynomials that a compiler can evaluate for many numbers at once, unlike the calls of a library; they were fitted to
// the functions that each comment names. Errors are in units of the last place. Doubles take the library's functions.
// `fmaf` is one instruction and rounds once, so no compiler may make another sum of it: bits stay those of any compiler.
// Where a CPU lacks it (x86 before 2013) the library computes it, with the same bits, slowly.

typedef union {
    float number;
    unsigned bits;
} Float;

// a + b x + c x^2 ...
#define POLY2(x, a, b) fmaf(x, b, a)
#define POLY3(x, a, ...) fmaf(x, POLY2(x, __VA_ARGS__), a)
#define POLY4(x, a, ...) fmaf(x, POLY3(x, __VA_ARGS__), a)
#define POLY5(x, a, ...) fmaf(x, POLY4(x, __VA_ARGS__), a)
#define POLY6(x, a, ...) fmaf(x, POLY5(x, __VA_ARGS__), a)
#define POLY7(x, a, ...) fmaf(x, POLY6(x, __VA_ARGS__), a)
#define POLY8(x, a, ...) fmaf(x, POLY7(x, __VA_ARGS__), a)
#define POLY9(x, a, ...) fmaf(x, POLY8(x, __VA_ARGS__), a)
#define POLY10(x, a, ...) fmaf(x, POLY9(x, __VA_ARGS__), a)
#define POLY11(x, a, ...) fmaf(x, POLY10(x, __VA_ARGS__), a)

// 2^n for n from -252 to 254, in two factors, as one would leave the range of floats too early.
static inline float scaled(float x, int n) {
    const int half = n >> 1;
    const Float low = {.bits = (unsigned)(half + 127) << 23}, high = {.bits = (unsigned)(n - half + 127) << 23};
    return x * low.number * high.number;
}

// The nearest n to x / ln 2, and what of x that leaves; n ln 2 in two parts, the first of which is exact.
static inline float powers_of_two(float x) { return rintf(x * 1.44269504f); }
static inline float without(float x, float n) { return fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x)); }

// e^r with |r| <= ln 2 / 2; (e^r - 1 - r) / r^2 by a polynomial.
static inline float exp_rest(float r) {
    const float p = POLY6(r, 0.5f, 0.16666667f, 0.041666456f, 0.008333284f, 0.0013934544f, 0.00019908905f);
    return 1.0f + fmaf(r * r, p, r);
}

// 2^n e^r
static inline float exp_of(float r, float n) {
    return scaled(exp_rest(r), (int)n);
}

// 1.0
static inline float exp_float(float x) {
    x = x > 89.0f ? 89.0f : x < -104.0f ? -104.0f : x;  // a NaN stays
    const float n = powers_of_two(x);
    return exp_of(without(x, n), n);
}

// Near 0 a polynomial, else e^x - 1. 1.6
static inline float expm1_float(float x) {
    const float p = POLY7(x, 0.5f, 0.16666667f, 0.041666668f, 0.008333182f, 0.0013888608f, 0.00019962185f, 2.4957046e-05f);
    return copysignf(fabsf(x) < 0.5f ? fmaf(x * x, p, x) : exp_float(x) - 1.0f, x);  // of -0 too
}

// (log1p(f) - f + f^2 / 2) / f^3 by a polynomial, for sqrt(1/2) <= 1 + f < sqrt(2).
static inline float log_near_one(float f) {
    const float p = POLY9(f, 0.3333333f, -0.2499998f, 0.20000689f, -0.16669151f, 0.14251155f, -0.123967074f, 0.11634677f, -0.116598874f, 0.073324375f);
    return f * f * fmaf(f, p, -0.5f);
}

// log x = n log 2 + log m with sqrt(1/2) <= m < sqrt(2). 1.0
static inline float log_float(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const Float from = {.number = tiny ? x * 8388608.0f : x};
    const int n = (int)(from.bits - 0x3f3504f3) >> 23;
    const Float m = {.bits = from.bits - ((unsigned)n << 23)};
    const float f = m.number - 1.0f, e = (float)n - (tiny ? 23.0f : 0.0f);
    const float y = fmaf(e, 0.693145752f, f + fmaf(e, 1.42860677e-6f, log_near_one(f)));
    return x > 0.0f && x < INFINITY ? y : x == 0.0f ? -INFINITY : x > 0.0f ? x : NAN;
}

// log of 1 + x as it is rounded, and what rounding took from it. 1.5
static inline float log1p_float(float x) {
    const float u = 1.0f + x, rest = x - (u - 1.0f);
    return copysignf(u < INFINITY ? (u > 0.0f ? log_float(u) + rest / u : log_float(u)) : u, x);
}

// Near 0 (tanh x / x - 1) / x^2 by a polynomial in x^2, else 1 - 2 q with q = 1 / (e^2|x| + 1). 1.3
static inline float tanh_with(float x, float q) {
    const float z = x * x, p = POLY5(z, -0.33333328f, 0.13332619f, -0.05382792f, 0.020889156f, -0.0059422534f);
    return copysignf(fabsf(x) < 0.65f ? fmaf(x * z, p, x) : x != x ? x : fmaf(-2.0f, q, 1.0f), x);
}

static inline float tanh_float(float x) { return tanh_with(x, 1.0f / (exp_float(2.0f * fabsf(x)) + 1.0f)); }

// e^(t^2) erfc(t) for t >= 0, that of 10.1 beyond: times t + 2 a polynomial in (t - 2) / (t + 2).
static inline float erfcx_float(float t) {
    t = t > 10.1f ? 10.1f : t;
    const float inverse = 1.0f / (t + 2.0f), u = (t - 2.0f) * inverse;
    const float p = POLY11(u, 1.0215827f, -0.6871607f, 0.27947177f, -0.036441784f, -0.021505722f, 0.0064758783f, 0.0030626061f, -0.00083206079f, -0.00059256145f, 4.6937109e-05f, 6.9479095e-05f);
    return p * inverse;
}

// t^2 in two parts, the first as it is rounded.
static inline float erfc_of(float t) {
    const float less = t > 10.1f ? 10.1f : t, square = less * less, n = powers_of_two(-square);
    return exp_of(without(-square, n) - fmaf(less, less, -square), n) * erfcx_float(less);
}

static inline float erfc_float(float x) {  // 4.7
    const float far = erfc_of(fabsf(x));
    return x > 0.0f ? far : 2.0f - far;
}

static inline float erf_float(float x) {  // near 0 erf x / x - 1 by a polynomial in x^2. 1.3
    const float z = x * x, far = copysignf(1.0f - erfc_of(fabsf(x)), x);
    const float p = POLY7(z, 0.12837917f, -0.37612632f, 0.112836726f, -0.026858104f, 0.005197797f, -0.0008105965f, 8.2154234e-05f);
    return fabsf(x) < 0.9f ? fmaf(x, p, x) : x != x ? x : far;
}

typedef union {
    double number;
    unsigned long long bits;
} Double;

// log2 x of x > 0 in the precision of doubles that a float needs: x = 2^n m with sqrt(1/2) <= m < sqrt(2), and a series
// in (m - 1) / (m + 1).
static inline double log2_of(double x) {
    const Double from = {.number = x};
    const int n = (int)((from.bits - 0x3fe6a09e667f3bcd + (1024ull << 52)) >> 52) - 1024;
    const Double m = {.bits = from.bits - ((unsigned long long)n << 52)};
    const double f = (m.number - 1) / (m.number + 1), z = f * f;
    const double p = 1 + z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9 + z * (1.0 / 11 + z * (1.0 / 13))))));
    return n + 2.8853900817779268 * f * p;
}

// 2^p with |p| <= 1000 in the same: the nearest whole number lies in the last bits of a large sum.
static inline double exp2_of(double p) {
    const double far = 6755399441055744.0;  // 1.5 2^52
    const Double whole = {.number = p + far}, power = {.bits = (whole.bits + 1023) << 52};
    const double r = (p - (whole.number - far)) * 0.6931471805599453;
    return power.number * (1 + r * (1 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720 + r * (1.0 / 5040))))))));
}

// By doubles. Below 0 there are powers for whole y only, whose sign the odd ones keep. What depends on y alone are bits,
// as gcc vectorizes no choice by a truth that is the same for all numbers. 0.51
static inline float pow_float(float x, float y) {
    const double a = fabsf(x), log = log2_of(a), l = a == 0 ? -INFINITY : a < INFINITY ? log : a, p = y * l;
    const double most = p > 1000 ? 1000 : p;
    const Float from = {.number = x}, power = {.number = exp2_of(most < -1000 ? -1000 : most)};
    const bool whole = rintf(y) == y, odd = whole && rintf(0.5f * y) != 0.5f * y;
    const unsigned sign = odd ? 1u << 31 : 0, none = whole ? 0 : 0x7fc00000, below = x < 0 && x > -INFINITY ? none : 0;
    const unsigned counts = fabsf(y) == INFINITY ? ~0u >> 1 : ~0u, all = y == 0 ? 0 : ~0u;  // -1 counts as 1 if y is infinite
    const Float made = {.bits = power.bits | (from.bits & sign) | below};
    return ((from.bits & counts) ^ 0x3f800000) & all ? made.number : 1.0f;
}

// Of five neighbors the one at `word`, by bits, which takes less than to gather it from a table.
#define NEXT(k, a, b) (((a) ^ (b)) & -(unsigned)(word > (k)))
#define AT(a, b, c, d, e) ((a) ^ NEXT(0, a, b) ^ NEXT(1, b, c) ^ NEXT(2, c, d) ^ NEXT(3, d, e))

// The bits of 2 / pi behind 32 zeros.
enum { P1 = 0xa2f9836e, P2 = 0x4e441529, P3 = 0xfc2757d1, P4 = 0xf534ddc0, P5 = 0xdb629599, P6 = 0x3c439041, P7 = 0xfe5163ab };

// sin(|x| + n pi / 2) for finite x. With |x| = m 2^e, the bits of 2 / pi before the 96 that are read here make multiples of
// 2 pi of it (M. Payne and R. Hanek, 1983): what remains is `turns` of 2 pi, in 64 bits, and in doubles what of them lies
// beside the nearest quarter. 0.53
static inline float sine(float x, unsigned n) {
    const Float from = {.number = fabsf(x)};
    const int e = (int)(from.bits >> 23) - 127;
    const int bit = e > -2 ? e + 7 : 5, word = bit >> 5, shift = bit & 31;
    const unsigned m = (from.bits & 0x7fffff) | 0x800000;
    const unsigned a = AT(0, P1, P2, P3, P4), b = AT(P1, P2, P3, P4, P5);
    const unsigned c = AT(P2, P3, P4, P5, P6), d = AT(P3, P4, P5, P6, P7);
    const unsigned high = a << shift | b >> 1 >> (31 - shift), middle = b << shift | c >> 1 >> (31 - shift);
    const unsigned low = c << shift | d >> 1 >> (31 - shift);
    const unsigned long long turns = ((unsigned long long)(m * high) << 32) + (unsigned long long)m * middle + ((unsigned long long)m * low >> 32);
    const unsigned long long beside = (turns << 2) + (1ull << 63);
    const double rest = (int)(unsigned)(beside >> 32 ^ 1u << 31) + (double)(int)((unsigned)beside >> 1) * 0x1p-31;
    const bool small = from.number < 0.78f;
    const double r = small ? (double)from.number : rest * (1.5707963267948966 * 0x1p-32), z = r * r;
    const unsigned quarter = n + (small ? 0 : (unsigned)(turns >> 62) + ((unsigned)(turns >> 61) & 1));
    const double odd = r + r * z * (-1.0 / 6 + z * (1.0 / 120 + z * (-1.0 / 5040 + z * (1.0 / 362880))));
    const double even = 1 + z * (-1.0 / 2 + z * (1.0 / 24 + z * (-1.0 / 720 + z * (1.0 / 40320 + z * (-1.0 / 3628800)))));
    const Float y = {.number = quarter & 1 ? even : odd};
    const Float turned = {.bits = y.bits ^ (quarter & 2) << 30};
    return turned.number;
}

static inline float sin_float(float x) {
    const Float from = {.number = x}, y = {.number = sine(x, 0)}, made = {.bits = y.bits ^ (from.bits & 1u << 31)};
    return fabsf(x) < INFINITY ? made.number : NAN;
}

static inline float cos_float(float x) { return fabsf(x) < INFINITY ? sine(x, 1) : NAN; }

#define OWN(name, x) _Generic((x), float: name##_float, default: name)(x)
#define exp(x) OWN(exp, x)
#define expm1(x) OWN(expm1, x)
#define log(x) OWN(log, x)
#define log1p(x) OWN(log1p, x)
#define tanh(x) OWN(tanh, x)
#define erf(x) OWN(erf, x)
#define erfc(x) OWN(erfc, x)
#define sin(x) OWN(sin, x)
#define cos(x) OWN(cos, x)

#define OF_TYPE(name, x) _Generic((x), float: name##f, default: name)(x)
#define sqrt(x) OF_TYPE(sqrt, x)
#define fabs(x) OF_TYPE(fabs, x)

// What an integer is as a float: gcc makes (float)(int)x one trunc(x), which may be -0, and adding 0 takes its sign.
static inline float of_integer_float(float x) { return x + 0; }
static inline double of_integer_double(double x) { return x + 0; }
#define of_integer(x) _Generic((x), float: of_integer_float, default: of_integer_double)(x)

// An integer is whole, though a double may not hold it.
static inline long long whole_integer(long long x) { return x; }
#define TO_WHOLE(name, x) _Generic((x), float: name##f, long long: whole_integer, default: name)(x)
#define floor(x) TO_WHOLE(floor, x)
#define ceil(x) TO_WHOLE(ceil, x)
#define rint(x) TO_WHOLE(rint, x)

// Powers of integers wrap, as their products do.
static inline long long power_integer(long long x, long long y) {
    unsigned long long power = 1, factor = x;
    for (; y > 0; y >>= 1, factor *= factor) power *= y & 1 ? factor : 1;
    return power;
}
#define pow(x, y) _Generic((x) + (y), float: pow_float, int: power_integer, long long: power_integer, default: pow)(x, y)

// The slope of the exact gelu, x Phi(x): Phi(x) + x phi(x), both with the same e^(-x^2 / 2).
static inline float gelu_slope_float(float x) {
    const float e = exp_float(-0.5f * x * x), half = 0.5f * e * erfcx_float(fabsf(x) * 0.70710678f);
    return (x > 0.0f ? 1.0f - half : half) + x * e * 0.39894228f;
}
static inline double gelu_slope_double(double x) {
    return 0.5 * erfc(x * -0.7071067811865476) + x * exp(-0.5 * x * x) * 0.3989422804014327;
}
#define gelu_slope(x) _Generic((x), float: gelu_slope_float, default: gelu_slope_double)(x)

static inline float rsqrt_float(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt_double(double x) { return 1.0 / sqrt(x); }
#define rsqrt(x) _Generic((x), float: rsqrt_float, default: rsqrt_double)(x)

// A NaN wins, as in NumPy.
static inline float max_float(float a, float b) { return a >= b || a != a ? a : b; }
static inline double max_double(double a, double b) { return a >= b || a != a ? a : b; }
static inline float min_float(float a, float b) { return a <= b || a != a ? a : b; }
static inline double min_double(double a, double b) { return a <= b || a != a ? a : b; }
#define fmax(a, b) _Generic((a) + (b), float: max_float, default: max_double)(a, b)
#define fmin(a, b) _Generic((a) + (b), float: min_float, default: min_double)(a, b)
