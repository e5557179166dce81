// Conversions: storage-only types to and from f32, and casts between compute types, bit for bit as torch on x86.
#pragma once

namespace plait {

// ---------------------------------------------------------------- bf16, f16, f8: storage types held as their bits

PLAIT_INLINE inline float from_bf16(uint16_t h) { return bits<float>(uint32_t(h) << 16); }

PLAIT_INLINE inline uint16_t to_bf16(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return uint16_t((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

PLAIT_INLINE inline float from_f16(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000u) << 16;
    const uint32_t mag = uint32_t(h & 0x7fffu) << 13;
    // exponent re-biased by multiplication, which also normalises subnormals; inf and NaN keep an all-ones exponent
    const uint32_t u = bits<uint32_t>(bits<float>(mag) * 0x1p112f);
    return bits<float>(sign | u | (mag >= 0x0f800000u ? 0x7f800000u : 0u));
}

// Rounding down to a small float, shared by the three formats below: `CUT` bits of the significand go, exponents move down by
// BIAS. Magnitudes are capped at `TOP`, which rounds to the greatest code; below `NORMAL`, adding a power of two (`ALIGN`)
// lets the adder align and round to the subnormal's last place. A NaN sets the bits `QUIET` on top of the greatest code.
template <int CUT, uint32_t BIAS, uint32_t TOP, uint32_t NORMAL, uint32_t ALIGN, uint32_t QUIET>
PLAIT_INLINE inline uint32_t narrow(float x) {
    const uint32_t magnitude = bits<uint32_t>(x) & 0x7fffffffu, mag = lesser(magnitude, TOP);
    const uint32_t normal = (mag - (BIAS << 23) + ((1u << (CUT - 1)) - 1u) + ((mag >> CUT) & 1u)) >> CUT;
    const uint32_t tiny = bits<uint32_t>(bits<float>(mag) + bits<float>(ALIGN)) - ALIGN;
    return (mag < NORMAL ? tiny : normal) | (magnitude > 0x7f800000u ? QUIET : 0u);
}
PLAIT_INLINE inline uint32_t sign_at(float x, int place) { return (bits<uint32_t>(x) >> 31) << place; }

PLAIT_INLINE inline uint16_t to_f16(float x) {
    return uint16_t(narrow<13, 112, 0x477ff000u, 0x38800000u, 0x3f000000u, 0x200u>(x) | sign_at(x, 15));
}

PLAIT_INLINE inline float from_f8e5m2(uint8_t q) { return from_f16(uint16_t(uint32_t(q) << 8)); }

// Overflow gives inf, as torch's cast.
PLAIT_INLINE inline uint8_t to_f8e5m2(float x) {
    return uint8_t(narrow<21, 112, 0x47700000u, 0x38800000u, 0x43000000u, 0x3u>(x) | sign_at(x, 7));
}

PLAIT_INLINE inline float from_f8e4m3(uint8_t q) {
    const uint32_t sign = uint32_t(q & 0x80u) << 24;
    const uint32_t mag = uint32_t(q & 0x7fu) << 20;
    const uint32_t u = bits<uint32_t>(bits<float>(mag) * 0x1p120f);
    return bits<float>(sign | (mag == 0x07f00000u ? 0x7fc00000u : u));
}

// The finite format (no inf): what is past 448, infinities too, becomes 448, as torch's cast; NaN before torch 2.13.
PLAIT_INLINE inline uint8_t to_f8e4m3(float x) {
#ifdef PLAIT_F8E4M3_NAN
    if ((bits<uint32_t>(x) & 0x7fffffffu) > 0x43e80000u) return uint8_t(0x7fu | sign_at(x, 7));  // 464 rounds to 448
#endif
    return uint8_t(narrow<20, 120, 0x43e00000u, 0x3c800000u, 0x46800000u, 0x1u>(x) | sign_at(x, 7));
}

PLAIT_INLINE inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }
PLAIT_INLINE inline float round_f16(float x) { return from_f16(to_f16(x)); }
PLAIT_INLINE inline float round_f8e5m2(float x) { return from_f8e5m2(to_f8e5m2(x)); }
PLAIT_INLINE inline float round_f8e4m3(float x) { return from_f8e4m3(to_f8e4m3(x)); }

// ---------------------------------------------------------------- i64 and floats

// Processors without vector conversions between i64 and floats (AVX2) get them from integer and double arithmetic.
#if defined(__x86_64__) && !defined(__AVX512DQ__)
PLAIT_INLINE inline double wide_from_i64(int64_t x) {
    // the halves become mantissas of 2^84 and 2^52: one exact difference, one rounded sum
    const double high = bits<double>((uint64_t(x) >> 32) ^ 0x4530000080000000u);
    const double low = bits<double>((uint64_t(x) & 0xffffffffu) | 0x4330000000000000u);
    return (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
}
PLAIT_INLINE inline float f32_from_i64(int64_t x) {
    // past 2^53 the low bits shrink to one sticky bit, so that the double is exact and only f32 rounds
    const bool small = uint64_t(x) + (uint64_t(1) << 53) < uint64_t(1) << 54;
    const int64_t low = x & 0x7ff;
    return float(wide_from_i64(small ? x : (x ^ low) | (low != 0 ? 0x400 : 0)));
}
PLAIT_INLINE inline int64_t i64_from_wide(double x) {
    const double t = c::trunc(x), high = c::floor(t * 0x1p-32), low = t - high * 0x1p32;
    const uint64_t whole = (bits<uint64_t>(high + 0x1.8p52) << 32) + (bits<uint64_t>(low + 0x1p52) & 0xffffffffu);
    return (t >= -0x1p63) & (t < 0x1p63) ? int64_t(whole) : INT64_MIN;
}
#else
PLAIT_INLINE inline double wide_from_i64(int64_t x) { return double(x); }
PLAIT_INLINE inline float f32_from_i64(int64_t x) { return float(x); }
PLAIT_INLINE inline int64_t i64_from_wide(double x) { return int64_t(x); }
#endif

// ---------------------------------------------------------------- casts between compute types

template <class To, class From>
struct Cast {
    static PLAIT_INLINE To from(From x) { return static_cast<To>(x); }
};
template <class To>
struct Cast<To, bool> {
    static PLAIT_INLINE To from(bool x) { return x ? To(1) : To(0); }
};
template <class From>
struct Cast<bool, From> {
    static PLAIT_INLINE bool from(From x) { return x != From(0); }
};
// Narrow integers come from the low bits of a wider truncation. For f32 the 32-bit one suffices even where it is out of
// range: it yields 2^31 there, and floats that large have no low 8 bits either.
#define PLAIT_CAST(TO, FROM, VIA)                                                          \
    template <>                                                                            \
    struct Cast<TO, FROM> {                                                                \
        static PLAIT_INLINE TO from(FROM x) { return static_cast<TO>(static_cast<VIA>(x)); } \
    };
PLAIT_CAST(uint8_t, float, int32_t)
PLAIT_CAST(int8_t, float, int32_t)
PLAIT_CAST(int16_t, float, int32_t)
PLAIT_CAST(int8_t, double, int32_t)
PLAIT_CAST(int16_t, double, int32_t)
#undef PLAIT_CAST
template <>
struct Cast<float, int64_t> {
    static PLAIT_INLINE float from(int64_t x) { return f32_from_i64(x); }
};
template <>
struct Cast<double, int64_t> {
    static PLAIT_INLINE double from(int64_t x) { return wide_from_i64(x); }
};
template <>
struct Cast<int64_t, float> {
    static PLAIT_INLINE int64_t from(float x) { return i64_from_wide(double(x)); }
};
template <>
struct Cast<int64_t, double> {
    static PLAIT_INLINE int64_t from(double x) { return i64_from_wide(x); }
};
template <>
struct Cast<uint8_t, double> {
    static PLAIT_INLINE uint8_t from(double x) { return uint8_t(i64_from_wide(x)); }
};

template <class To, class From>
PLAIT_INLINE inline To cast(From x) {
    return Cast<To, From>::from(x);
}

}  // namespace plait
