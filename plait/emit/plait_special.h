// Special functions that kernels call rarely; not vectorised, computed in double.
#pragma once

namespace plait {

inline double lgamma_f64(double x) {
    int sign_unused = 0;
    return __builtin_lgamma_r(x, &sign_unused);  // the plain one writes a global
}
template <class T>
inline T lgamma(T x) {
    return T(lgamma_f64(double(x)));
}

// The logarithmic derivative of gamma: reflection to x > 0, recurrence up to 10, then the asymptotic series in 1/x^2
// with coefficients B_2k / 2k.
inline double digamma_f64(double x) {
    constexpr double pi = 3.14159265358979323846;
    const double inf = std::numeric_limits<double>::infinity();
    if (x == 0) return c::copysign(inf, -x);
    if (x == -inf) return std::numeric_limits<double>::quiet_NaN();
    double less = 0;
    if (x < 0) {
        const double part = x - c::trunc(x);
        if (part == 0) return std::numeric_limits<double>::quiet_NaN();
        less = pi / c::tan(pi * part);
        x = 1 - x;
    }
    for (; x < 10; x += 1) less += 1 / x;
    if (x == inf) return x;
    const double z = 1 / (x * x);
    const double series =
        z * (1.0 / 12 -
             z * (1.0 / 120 - z * (1.0 / 252 - z * (1.0 / 240 - z * (1.0 / 132 - z * (691.0 / 32760 - z * (1.0 / 12)))))));
    return c::log(x) - 0.5 / x - series - less;
}
template <class T>
inline T digamma(T x) {
    return T(digamma_f64(double(x)));
}

// Newton's steps on erf (or erfc in the tails, where 1 - y is exact) from a closed-form start.
inline double erfinv_f64(double y) {
    const double mag = c::fabs(y);
    if (!(mag < 1)) return mag == 1 ? c::copysign(std::numeric_limits<double>::infinity(), y) : std::numeric_limits<double>::quiet_NaN();
    if (mag == 0) return y;
    const double w = c::log1p(-mag * mag), b = 2 / (3.14159265358979323846 * 0.147) + w / 2;
    double x = c::sqrt(c::sqrt(b * b - w / 0.147) - b);
    const double rest = 1 - mag;
    for (int k = 0; k < 3; ++k) {
        const double f = mag < 0.5 ? c::erf(x) - mag : rest - c::erfc(x);
        const double slope = 1.12837916709551257390 * c::exp(-x * x);
        const double step = f / slope;
        x -= step / (1 + x * step);  // Halley's correction: the second derivative is -2x times the first
    }
    return c::copysign(x, y);
}
template <class T>
inline T erfinv(T x) {
    return T(erfinv_f64(double(x)));
}

}  // namespace plait
