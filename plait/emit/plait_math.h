// Every map operator that is not written infix, for f32, f64 and the integers. Names are those of ir/ops.
#pragma once

namespace plait {

// ---------------------------------------------------------------- exact and structural

template <class T>
PLAIT_INLINE inline T abs(T x) {
    if constexpr (std::is_floating_point_v<T>)
        return c::fabs(x);
    else
        return T(x < T(0) ? T(-x) : x);
}
template <class T>
PLAIT_INLINE inline T sign(T x) {
    // a NaN has sign 0, as in torch
    return T((x > T(0)) - (x < T(0)));
}
template <class T>
PLAIT_INLINE inline T maximum(T a, T b) {
    return (a > b) | (a != a) ? a : b;
}
template <class T>
PLAIT_INLINE inline T minimum(T a, T b) {
    return (a < b) | (a != a) ? a : b;
}
template <class T>
PLAIT_INLINE inline T fmax(T a, T b) {
    return (a >= b) | (b != b) ? a : b;
}
template <class T>
PLAIT_INLINE inline T fmin(T a, T b) {
    return (a <= b) | (b != b) ? a : b;
}
template <class T>
PLAIT_INLINE inline bool isnan(T x) {
    return x != x;
}
template <class T>
PLAIT_INLINE inline bool isinf(T x) {
    return c::fabs(x) == std::numeric_limits<T>::infinity();
}
PLAIT_INLINE inline bool signbit(float x) { return bits<int32_t>(x) < 0; }
PLAIT_INLINE inline bool signbit(double x) { return bits<int64_t>(x) < 0; }

template <class T>
PLAIT_INLINE inline T sqrt(T x) {
    return c::sqrt(x);
}
template <class T>
PLAIT_INLINE inline T rsqrt(T x) {
    return T(1) / c::sqrt(x);
}
template <class T>
PLAIT_INLINE inline T reciprocal(T x) {
    return T(1) / x;
}
template <class T>
PLAIT_INLINE inline T floor(T x) {
    return c::floor(x);
}
template <class T>
PLAIT_INLINE inline T ceil(T x) {
    return c::ceil(x);
}
template <class T>
PLAIT_INLINE inline T trunc(T x) {
    return c::trunc(x);
}
// half to even, in the default rounding mode
template <class T>
PLAIT_INLINE inline T round(T x) {
    return c::rint(x);
}
template <class T>
PLAIT_INLINE inline T copysign(T x, T y) {
    return c::copysign(x, y);
}
template <class T>
PLAIT_INLINE inline T nextafter(T x, T y) {
    return c::nextafter(x, y);
}
template <class T>
PLAIT_INLINE inline T fmod_f(T x, T y) {
    return c::fmod(x, y);
}
// Python's sign: that of the divisor
template <class T>
PLAIT_INLINE inline T remainder_f(T x, T y) {
    const T r = c::fmod(x, y);
    return (r != T(0)) & ((y < T(0)) != (r < T(0))) ? r + y : r;
}

// ---------------------------------------------------------------- integers (divisors are not zero: the kernel has checked)

template <class T>
PLAIT_INLINE inline T truncdiv(T a, T b) {
    // the least integer over -1 wraps instead of trapping
    return b == T(-1) && std::is_signed_v<T> ? T(-a) : T(a / b);
}
template <class T>
PLAIT_INLINE inline T fmod(T a, T b) {
    return b == T(-1) && std::is_signed_v<T> ? T(0) : T(a % b);
}
template <class T>
PLAIT_INLINE inline T pyfloordiv(T a, T b) {
    const T r = fmod(a, b);
    return T(truncdiv(a, b) - T((r != T(0)) & ((r < T(0)) != (b < T(0)))));
}
template <class T>
PLAIT_INLINE inline T remainder(T a, T b) {
    const T r = fmod(a, b);
    return T(r + ((r != T(0)) & ((r < T(0)) != (b < T(0))) ? b : T(0)));
}
// Wrapping power; a negative exponent gives the rounded reciprocal: 1, -1 or 0.
template <class T>
PLAIT_INLINE inline T ipow(T base, T exponent) {
    if (exponent < T(0)) return base == T(1) ? T(1) : base == T(-1) ? T(exponent & 1 ? -1 : 1) : T(0);
    T out = T(1), square = base;
    for (std::make_unsigned_t<T> e = std::make_unsigned_t<T>(exponent); e != 0; e = std::make_unsigned_t<T>(e >> 1)) {
        out = (e & 1) ? T(out * square) : out;
        square = T(square * square);
    }
    return out;
}
// Shifts by less than 0 or by the width and more give 0, for shr what the sign gives: torch's rule.
template <class T>
PLAIT_INLINE inline T shl(T a, T b) {
    constexpr int width = int(sizeof(T)) * 8;
    const bool out = (b < T(0)) | (b >= T(width));
    using U = std::make_unsigned_t<T>;
    return out ? T(0) : T(U(a) << (unsigned(b) & unsigned(width - 1)));
}
template <class T>
PLAIT_INLINE inline T shr(T a, T b) {
    constexpr int width = int(sizeof(T)) * 8;
    const bool out = (b < T(0)) | (b >= T(width));
    const T r = T(a >> (out ? width - 1 : int(b)));
    return out & (a >= T(0)) ? T(0) : r;
}

// ---------------------------------------------------------------- elementary functions of f64, by the C library

#define PLAIT_LIBM(NAME) \
    PLAIT_INLINE inline double NAME(double x) { return c::NAME(x); }
PLAIT_LIBM(exp)
PLAIT_LIBM(exp2)
PLAIT_LIBM(expm1)
PLAIT_LIBM(log)
PLAIT_LIBM(log2)
PLAIT_LIBM(log10)
PLAIT_LIBM(log1p)
PLAIT_LIBM(sin)
PLAIT_LIBM(cos)
PLAIT_LIBM(tan)
PLAIT_LIBM(asin)
PLAIT_LIBM(acos)
PLAIT_LIBM(atan)
PLAIT_LIBM(sinh)
PLAIT_LIBM(cosh)
PLAIT_LIBM(tanh)
PLAIT_LIBM(asinh)
PLAIT_LIBM(acosh)
PLAIT_LIBM(atanh)
PLAIT_LIBM(erf)
PLAIT_LIBM(erfc)
#undef PLAIT_LIBM

PLAIT_INLINE inline double pow(double x, double y) { return c::pow(x, y); }
PLAIT_INLINE inline double atan2(double y, double x) { return c::atan2(y, x); }
PLAIT_INLINE inline double hypot(double x, double y) { return c::hypot(x, y); }
PLAIT_INLINE inline double sigmoid(double x) {
    const double e = c::exp(-c::fabs(x));
    return (x < 0 ? e : 1.0) / (1.0 + e);
}

}  // namespace plait

#include "plait_elementary.h"
#include "plait_special.h"
