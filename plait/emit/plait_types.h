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

PLAIT_INLINE inline uint16_t to_f16(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t mag = u & 0x7fffffffu;
    const uint32_t normal = (mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13;
    // below 2^-14: adding 0.5 lets the adder align and round to the subnormal's last place
    const uint32_t tiny = bits<uint32_t>(bits<float>(mag) + 0.5f) - 0x3f000000u;
    uint32_t h = mag < 0x38800000u ? tiny : normal;
    h = mag >= 0x477ff000u ? 0x7c00u : h;
    h = mag > 0x7f800000u ? 0x7e00u : h;
    return uint16_t(h | sign);
}

PLAIT_INLINE inline float from_f8e5m2(uint8_t q) { return from_f16(uint16_t(uint32_t(q) << 8)); }

// Overflow gives inf, as torch's cast.
PLAIT_INLINE inline uint8_t to_f8e5m2(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t sign = (u >> 24) & 0x80u;
    const uint32_t mag = u & 0x7fffffffu;
    const uint32_t normal = (mag - 0x38000000u + 0xfffffu + ((mag >> 21) & 1u)) >> 21;
    const uint32_t tiny = bits<uint32_t>(bits<float>(mag) + 0x1p7f) - 0x43000000u;
    uint32_t h = mag < 0x38800000u ? tiny : normal;
    h = mag >= 0x47700000u ? 0x7cu : h;
    h = mag > 0x7f800000u ? 0x7fu : h;
    return uint8_t(h | sign);
}

PLAIT_INLINE inline float from_f8e4m3(uint8_t q) {
    const uint32_t sign = uint32_t(q & 0x80u) << 24;
    const uint32_t mag = uint32_t(q & 0x7fu) << 20;
    const uint32_t u = bits<uint32_t>(bits<float>(mag) * 0x1p120f);
    return bits<float>(sign | (mag == 0x07f00000u ? 0x7fc00000u : u));
}

// The finite format (no inf): what is past 448, infinities too, becomes 448, as torch's cast.
PLAIT_INLINE inline uint8_t to_f8e4m3(float x) {
    const uint32_t u = bits<uint32_t>(x);
    const uint32_t sign = (u >> 24) & 0x80u;
    const uint32_t mag = u & 0x7fffffffu;
    const uint32_t normal = (mag - 0x3c000000u + 0x7ffffu + ((mag >> 20) & 1u)) >> 20;
    const uint32_t tiny = bits<uint32_t>(bits<float>(mag) + 0x1p14f) - 0x46800000u;
    uint32_t h = mag < 0x3c800000u ? tiny : normal;
    h = h > 0x7eu ? 0x7eu : h;
    h = mag > 0x7f800000u ? 0x7fu : h;
    return uint8_t(h | sign);
}

PLAIT_INLINE inline float round_bf16(float x) { return from_bf16(to_bf16(x)); }
PLAIT_INLINE inline float round_f16(float x) { return from_f16(to_f16(x)); }
PLAIT_INLINE inline float round_f8e5m2(float x) { return from_f8e5m2(to_f8e5m2(x)); }
PLAIT_INLINE inline float round_f8e4m3(float x) { return from_f8e4m3(to_f8e4m3(x)); }

// ---------------------------------------------------------------- casts between compute types

template <class To, class From>
struct Cast {
    static PLAIT_INLINE To from(From x) { return static_cast<To>(x); }
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
PLAIT_CAST(uint8_t, double, int64_t)
PLAIT_CAST(int8_t, double, int32_t)
PLAIT_CAST(int16_t, double, int32_t)
#undef PLAIT_CAST

template <class To, class From>
PLAIT_INLINE inline To cast(From x) {
    return Cast<To, From>::from(x);
}

}  // namespace plait
