// Elementary functions of f32, branch-free so that loops over them become vector loops. The hot ones (exp, exp2, expm1, log,
// tanh, sigmoid, erf) stay in f32 and err by at most about 1.5 units in the last place; the others compute in double and
// err by little more than half a unit. All hold over the whole range, NaN, infinities, signed zeros and subnormals included.
// Coefficients are minimax fits of our own (Remez in 40 digits, relative error). f64 goes to the C library.
#pragma once

namespace plait {

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
PLAIT_INLINE inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
PLAIT_INLINE inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
PLAIT_INLINE inline float fma(float a, float b, float c) { return a * b + c; }
PLAIT_INLINE inline double fma(double a, double b, double c) { return a * b + c; }
#endif

// c0 + c1*x + c2*x^2 + ...
template <class T>
PLAIT_INLINE inline T poly(T, T c0) {
    return c0;
}
template <class T, class... More>
PLAIT_INLINE inline T poly(T x, T c0, More... more) {
    return fma(poly(x, T(more)...), x, c0);
}

// The lesser and greater of x and a constant; a NaN x stays.
template <class T>
PLAIT_INLINE inline T at_most(T x, T high) {
    return x > high ? high : x;
}
template <class T>
PLAIT_INLINE inline T at_least(T x, T low) {
    return x < low ? low : x;
}

// ---------------------------------------------------------------- f32 cores

// x = n*ln2 + r with |r| <= ln2/2; ln2 in two parts, the first short enough for exact products. `biased` holds n + 254 in
// its low bits.
PLAIT_INLINE inline float reduce_ln2(float x, uint32_t& biased) {
    constexpr float shift = 0x1.8p23f + 254.0f;
    const float t = fma(x, 0x1.715476p+0f, shift), n = t - shift;
    biased = bits<uint32_t>(t);
    return fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));
}
// y * 2^n in two steps, so that the result is rounded once also where it is subnormal
PLAIT_INLINE inline float scale(float y, uint32_t biased) {
    const uint32_t half = (biased >> 1) << 23;
    return y * bits<float>(half) * bits<float>((biased << 23) - half);
}
// e^r for a reduced r
PLAIT_INLINE inline float exp_core(float r) {
    const float p = poly(r, 0x1.fffffcp-2f, 0x1.555490p-3f, 0x1.5558f4p-5f, 0x1.123a6cp-7f, 0x1.6a234cp-10f);
    return 1.0f + fma(r * r, p, r);
}
// e^x for -80 < x < 80
PLAIT_INLINE inline float exp_near(float x) {
    uint32_t n;
    const float r = reduce_ln2(x, n);
    return exp_core(r) * bits<float>((n - 127u) << 23);
}

// One clamp keeps a NaN and is one instruction; two in a row would not be, so overflow is decided at the end.
PLAIT_INLINE inline float exp(float x) {
    uint32_t n;
    const float r = reduce_ln2(at_least(x, -104.0f), n);
    const float y = scale(exp_core(r), n);
    return x > 0x1.62e42ep+6f ? std::numeric_limits<float>::infinity() : y;
}

PLAIT_INLINE inline float exp2(float x) {
    constexpr float shift = 0x1.8p23f + 254.0f;
    const float c = at_least(x, -151.0f), t = c + shift;
    const float r = c - (t - shift);
    const float p =
        poly(r, 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6aee6p-5f, 0x1.3b2d52p-7f, 0x1.5f3f2ep-10f, 0x1.41fa12p-13f);
    const float y = scale(fma(r, p, 1.0f), bits<uint32_t>(t));
    return x >= 128.0f ? std::numeric_limits<float>::infinity() : y;
}

// 2^n * expm1(r) + (2^n - 1), with 2^(n-1) as the unit so that n = 128 is in range
PLAIT_INLINE inline float expm1(float x) {
    uint32_t n;
    const float r = reduce_ln2(at_least(x, -30.0f), n);
    const float p = poly(r, 0x1.000000p-1f, 0x1.555556p-3f, 0x1.5554aep-5f, 0x1.11108ep-7f, 0x1.6d7530p-10f, 0x1.a1a250p-13f);
    const float s = bits<float>((n - 128u) << 23);
    const float y = c::copysign(2.0f * fma(s, fma(r * r, p, r), s - 0.5f), x);
    return x > 0x1.62e42ep+6f ? std::numeric_limits<float>::infinity() : y;
}

// Odd polynomial below 0.6; above, 1 - 2/(exp(2|x|) + 1)
PLAIT_INLINE inline float tanh(float x) {
    const float a = at_most(c::fabs(x), 10.0f), u = a * a;
    const float p = poly(u, -0x1.55553ep-2f, 0x1.1109eep-3f, -0x1.b8a096p-5f, 0x1.54e8aap-6f, -0x1.83282cp-8f);
    const float small = fma(a * u, p, a), large = 1.0f - 2.0f / (exp_near(2.0f * a) + 1.0f);
    return c::copysign(a > 0.6f ? large : small, x);
}

PLAIT_INLINE inline float sigmoid(float x) {
    uint32_t n;
    const float r = reduce_ln2(at_least(-c::fabs(x), -104.0f), n), e = scale(exp_core(r), n);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// What a logarithm is where its argument is not a positive finite number.
template <class T>
PLAIT_INLINE inline T log_edges(T x, T y) {
    constexpr T inf = std::numeric_limits<T>::infinity();
    const T edge = x == T(0) ? -inf : std::numeric_limits<T>::quiet_NaN();
    y = x > T(0) ? y : edge;
    return x < inf ? y : x;
}

// x = 2^e * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
PLAIT_INLINE inline float log(float x) {
    const bool tiny = x < 0x1p-126f;
    const uint32_t u = bits<uint32_t>(tiny ? x * 0x1p23f : x) - 0x3f3504f3u;
    const float e = float((int32_t(u) >> 23) - (tiny ? 23 : 0));
    const float f = bits<float>((u & 0x7fffffu) + 0x3f3504f3u) - 1.0f, z = f * f;
    const float p = poly(f, 0x1.555546p-2f, -0x1.ffffeep-3f, 0x1.99a546p-3f, -0x1.5562e4p-3f, 0x1.2332c8p-3f, -0x1.fb42f6p-4f,
                         0x1.e65010p-4f, -0x1.e2eaa8p-4f, 0x1.1b450ep-4f);
    const float low = fma(e, -2.12194440e-4f, fma(z * f, p, -0.5f * z));
    return log_edges(x, fma(e, 0.693359375f, f + low));
}

// x + x*p(x^2) below 0.92; above, 1 - exp(-q(|x|)) with q a polynomial fitted to -log(erfc)
PLAIT_INLINE inline float erf(float x) {
    const float a = at_most(c::fabs(x), 4.0f), u = a * a;
    const float p = poly(u, 0x1.06eba8p-3f, -0x1.812742p-2f, 0x1.ce2e10p-4f, -0x1.b80f34p-6f, 0x1.54ce32p-8f, -0x1.aa76f2p-11f,
                         0x1.5d8eaap-14f);
    const float q = poly(a, -0x1.6e563ap-13f, 0x1.2127e4p+0f, 0x1.44460cp-1f, 0x1.bb83e2p-4f, -0x1.9b8e78p-6f, 0x1.115ac0p-8f,
                         -0x1.c790e6p-12f, 0x1.61ea2ap-16f);
    return c::copysign(a > 0.92f ? 1.0f - exp_near(-q) : fma(a, p, a), x);
}

// ---------------------------------------------------------------- double cores for f32 results

// log of a positive normal number, to 2^-50
PLAIT_INLINE inline double wide_log(double x) {
    constexpr uint64_t root = 0x3fe6a09e667f3bcdu, one = 0x3ff0000000000000u;
    const uint64_t u = bits<uint64_t>(x) + (one - root);
    // the exponent becomes a double by way of the mantissa of 2^52
    const double e = bits<double>((u >> 52) | 0x4330000000000000u) - (0x1p52 + 1023);
    const double m = bits<double>((u & 0x000fffffffffffffu) + root), s = (m - 1) / (m + 1), z = s * s;
    const double p = poly(z, 0.6666666666658703, 0.4000000005250274, 0.28571417076359884, 0.22223376400732628,
                          0.18123465644842685, 0.1682219689172953);
    return fma(e, 0.69314718055994530942, fma(s * z, p, 2 * s));
}
// exp to 2^-39, for |x| < 700
PLAIT_INLINE inline double wide_exp(double x) {
    constexpr double shift = 0x1.8p52;
    const double t = fma(x, 1.44269504088896340736, shift), r = fma(t - shift, -0.69314718055994530942, x);
    const double p = poly(r, 0.4999999999951626, 0.16666666787293105, 0.041666667056116095, 0.008333281078559884,
                          0.0013888796116694293, 0.00019909369285827212, 2.4887755224544697e-05);
    return fma(r * r, p, 1 + r) * bits<double>((bits<uint64_t>(t) << 52) + 0x3ff0000000000000u);
}
// log(1 + x) for x > -1, keeping what 1 + x drops
PLAIT_INLINE inline double wide_log1p(double x) {
    const double u = 1 + x;
    return wide_log(u) + (x - (u - 1)) / u;
}
// atan on [0, 1]
PLAIT_INLINE inline double wide_atan(double x) {
    const double z = x * x;
    const double p = poly(z, -0.3333333228551802, 0.19999934125656824, -0.14284278569253783, 0.11095408192980137,
                          -0.08989693905095976, 0.07271873791242632, -0.054748984541903224, 0.03475608326498849,
                          -0.01650855336574259, 0.005014503214745665, -0.0007139987319749752);
    return fma(x * z, p, x);
}
constexpr double PI = 3.14159265358979323846;

PLAIT_INLINE inline float log2(float x) { return log_edges(x, float(wide_log(double(x)) * 1.44269504088896340736)); }
PLAIT_INLINE inline float log10(float x) { return log_edges(x, float(wide_log(double(x)) * 0.43429448190325182765)); }
PLAIT_INLINE inline float log1p(float x) {
    const float y = c::copysign(float(wide_log1p(double(x))), x);
    const float edge = x < -1.0f ? std::numeric_limits<float>::quiet_NaN() : -std::numeric_limits<float>::infinity();
    return x <= -1.0f ? edge : (x == std::numeric_limits<float>::infinity()) | (x != x) ? x : y;
}

PLAIT_INLINE inline float sinh(float x) {
    const double a = c::fabs(at_most(at_least(double(x), -100.0), 100.0)), e = wide_exp(a), z = a * a;
    // the difference cancels near 0
    const double y = a < 0.25 ? fma(a * z, poly(z, 1.0 / 6, 1.0 / 120, 1.0 / 5040), a) : 0.5 * (e - 1 / e);
    return c::copysign(float(y), x);
}
PLAIT_INLINE inline float cosh(float x) {
    const double e = wide_exp(c::fabs(at_most(at_least(double(x), -100.0), 100.0)));
    return float(0.5 * (e + 1 / e));
}
PLAIT_INLINE inline float asinh(float x) {
    const double a = c::fabs(double(x)), z = a * a;
    const float y = c::copysign(float(wide_log1p(a + z / (1 + c::sqrt(1 + z)))), x);
    return (c::fabs(x) == std::numeric_limits<float>::infinity()) | (x != x) ? x : y;
}
PLAIT_INLINE inline float acosh(float x) {
    const double t = double(x) - 1;
    const float y = float(wide_log1p(t + c::sqrt(t * (t + 2))));
    return x < 1.0f ? std::numeric_limits<float>::quiet_NaN()
                    : (x == std::numeric_limits<float>::infinity()) | (x != x) ? x : x == 1.0f ? 0.0f : y;
}
PLAIT_INLINE inline float atanh(float x) {
    const double a = c::fabs(double(x));
    const float y = float(0.5 * wide_log1p(2 * a / (1 - a)));
    const float edge = a > 1 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
    return x != x ? x : c::copysign(a >= 1 ? edge : y, x);
}

// asin by its series below 1/2, by asin(x) = pi/2 - 2 asin(sqrt((1-x)/2)) above: the caller adds the pi/2
PLAIT_INLINE inline double wide_asin(double a, bool big) {
    const double z = big ? 0.5 * (1 - a) : a * a, s = big ? c::sqrt(z) : a;
    const double p = poly(z, 0.16666667153058748, 0.07499950393000922, 0.044659675525428086, 0.03011535468077712,
                          0.02459069536067602, 0.007544204531314453, 0.03461234876975164);
    return fma(s * z, p, s);
}
PLAIT_INLINE inline float asin(float x) {
    const double a = c::fabs(double(x));
    const bool big = a > 0.5;
    const double r = wide_asin(a, big);
    return c::copysign(float(big ? PI / 2 - 2 * r : r), x);
}
PLAIT_INLINE inline float acos(float x) {
    const double a = c::fabs(double(x));
    const bool big = a > 0.5;
    const double r = wide_asin(a, big), lesser = big ? 2 * r : PI / 2 - r;
    return float(x < 0.0f ? PI - lesser : lesser);
}
PLAIT_INLINE inline float atan(float x) {
    const double a = c::fabs(double(x));
    const bool big = a > 1;
    const double r = wide_atan(big ? 1 / a : a);
    return c::copysign(float(big ? PI / 2 - r : r), x);
}
PLAIT_INLINE inline float atan2(float y, float x) {
    const double a = c::fabs(double(x)), b = c::fabs(double(y));
    const bool steep = b > a;
    const double high = steep ? b : a, low = steep ? a : b;
    // equal ones include two infinities; the axis itself has no quotient
    const double t = high == 0 ? 0.0 : low == high ? 1.0 : low / high;
    double r = wide_atan(t);
    r = steep ? PI / 2 - r : r;
    r = bits<int32_t>(x) < 0 ? PI - r : r;
    return (x != x) | (y != y) ? x + y : c::copysign(float(r), y);
}

// exp(x^2) erfc(x) is smooth in (x-3)/(x+3)
PLAIT_INLINE inline float erfc(float x) {
    const double a = at_most(c::fabs(double(x)), 10.2), t = (a - 3) / (a + 3);
    const double p = poly(t, 0.17900115118132506, -0.32623356004645837, 0.2456038017318493, -0.15011593626952574,
                          0.07166583643589766, -0.024392504037474158, 0.004269146043944589, 0.000707791239087036,
                          -0.0005971119741656148, 4.5028927094873476e-05, 6.414222040230426e-05, -1.2252332170400236e-05,
                          -7.875939944951269e-06, 1.355665101228581e-06, 8.334473644543386e-07);
    const double y = p * wide_exp(-a * a);
    return float(x < 0.0f ? 2 - y : y);
}

// C's pow: |x|^y by way of logarithms, then signs and special cases
PLAIT_INLINE inline float pow(float x, float y) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    const float a = c::fabs(x);
    const double l = a == 0.0f ? -double(inf) : a == inf ? double(inf) : wide_log(double(a));
    const double power = wide_exp(at_least(at_most(double(y) * l, 300.0), -300.0));
    float r = (a == 1.0f) & (y == y) ? 1.0f : float(power);
    // halves of large numbers are whole, so those count as even
    const bool whole = c::floor(y) == y, odd = whole & (c::floor(y * 0.5f) * 2.0f != y) & (c::fabs(y) != inf);
    r = (x < 0.0f) & (a != inf) & !whole ? std::numeric_limits<float>::quiet_NaN() : r;
    r = (bits<int32_t>(x) < 0) & odd ? -r : r;
    return (y == 0.0f) | (x == 1.0f) ? 1.0f : (x != x) ? x : r;
}

PLAIT_INLINE inline float hypot(float x, float y) {
    constexpr float inf = std::numeric_limits<float>::infinity();
    const double a = x, b = y;
    return (c::fabs(x) == inf) | (c::fabs(y) == inf) ? inf : float(c::sqrt(a * a + b * b));
}

// ---------------------------------------------------------------- f32 circular functions

struct Turn {
    double angle;      // in [-pi/4, pi/4]
    int64_t quadrant;  // the low two bits count
};
// Reduces any f32 modulo pi/2. 2/pi is cut into pieces of 29 bits, so that each product with a 24-bit significand is exact
// and may drop its multiples of 4; whole quadrants leave the sum before smaller products join it.
PLAIT_INLINE inline Turn turn(float value) {
    const double x = value;
    double part = 0, quadrants = 0;
    const auto join = [&](double piece) PLAIT_INLINE {
        const double t = x * piece, sum = part + (t - 4 * c::rint(t * 0.25)), whole = c::rint(sum);
        part = sum - whole;
        quadrants += whole;
    };
    join(0x1.45f306dp-1);
    join(0x1.9391054p-30);
    join(0x1.4fe13abp-59);
    join(0x1.d1f534dp-88);
    join(0x1.b81b6c5p-117);
    join(0x1.5993c4p-148);
    join(0x1.c820ff2p-175);
    return {part * (PI / 2), bits<int64_t>(quadrants + 0x1.8p52)};
}
PLAIT_INLINE inline double sin_core(double r) {
    const double z = r * r;
    return fma(r * z, poly(z, -0.16666666641465933, 0.008333329365295862, -0.0001983932780070794, 2.71824178244177e-06), r);
}
PLAIT_INLINE inline double cos_core(double r) {
    const double z = r * r;
    const double p = poly(z, 0.04166666662261692, -0.0013888883732362193, 2.479951392362956e-05, -2.7209701871521105e-07);
    return fma(z * z, p, fma(z, -0.5, 1.0));
}
PLAIT_INLINE inline float sin(float x) {
    const Turn t = turn(x);
    const double y = t.quadrant & 1 ? cos_core(t.angle) : sin_core(t.angle);
    return x == 0.0f ? x : float(t.quadrant & 2 ? -y : y);
}
PLAIT_INLINE inline float cos(float x) {
    const Turn t = turn(x);
    const double y = t.quadrant & 1 ? sin_core(t.angle) : cos_core(t.angle);
    return float((t.quadrant + 1) & 2 ? -y : y);
}
PLAIT_INLINE inline float tan(float x) {
    const Turn t = turn(x);
    const double s = sin_core(t.angle), c = cos_core(t.angle);
    const bool odd = (t.quadrant & 1) != 0;
    return x == 0.0f ? x : float((odd ? -c : s) / (odd ? s : c));
}

}  // namespace plait
