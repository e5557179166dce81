// Counter-based random numbers: Philox-4x32-10. One draw at one linear index is one block of four words:
//   counter = (low 32 bits of index, high 32 bits of index, low 32 bits of offset, draw), key = (low, high 32 bits of seed)
//   rand:  f32 = (w0 >> 8) * 2^-24; f64 = ((w0 << 32 | w1) >> 11) * 2^-53
//   randn: sqrt(-2 log(1 - u0)) * cos(2 pi u1), u0 and u1 the f32 numbers of w0 and w1
//   randbits: i64 = (w1 << 32 | w0) >> 1, i32 = w0 >> 1
#pragma once

namespace plait {

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u, PHILOX_W0 = 0x9E3779B9u, PHILOX_W1 = 0xBB67AE85u;

// The first two words, w1 << 32 | w0.
PLAIT_INLINE inline uint64_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(c0) * PHILOX_M0, p1 = uint64_t(c2) * PHILOX_M1;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return uint64_t(c1) << 32 | c0;
}

PLAIT_INLINE inline float unit_f32(uint32_t w) { return float(int32_t(w >> 8)) * 0x1p-24f; }

// cos(2 pi u) for u in [0, 1): the quadrant leaves 4u exactly
PLAIT_INLINE inline float cos_turn(float u) {
    const float quadrant = std::rint(4.0f * u), r = (4.0f * u - quadrant) * 0x1.921fb6p+0f, z = r * r;
    const float c = fma(z * z, poly(z, 0x1.55554ap-5f, -0x1.6c0c84p-10f, 0x1.99ffd2p-16f), fma(z, -0.5f, 1.0f));
    const float s = fma(r * z, poly(z, -0x1.555546p-3f, 0x1.110758p-7f, -0x1.994b62p-13f), r);
    const float even = quadrant == 2.0f ? -c : c, odd = quadrant == 1.0f ? -s : s;
    return (quadrant == 1.0f) | (quadrant == 3.0f) ? odd : even;
}
PLAIT_INLINE inline double cos_turn(double u) { return std::cos(2 * PI * u); }

// A normal number by Box and Muller
template <class T>
PLAIT_INLINE inline T normal(uint32_t w0, uint32_t w1) {
    return sqrt(T(-2) * log(T(1) - T(unit_f32(w0)))) * cos_turn(T(unit_f32(w1)));
}

}  // namespace plait

// GCC turns the 32x32-bit products above into shuffles. On AVX2 it is given vector versions instead, under the names that
// the vector function ABI reserves for loops that call these functions.
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

#pragma omp declare simd notinbranch simdlen(8) uniform(c2, c3, k0, k1)
extern "C" uint32_t plait_philox32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) noexcept __attribute__((const));
#pragma omp declare simd notinbranch simdlen(4) uniform(c2, c3, k0, k1)
extern "C" uint64_t plait_philox64(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) noexcept __attribute__((const));
#pragma omp declare simd notinbranch simdlen(8) uniform(c2, c3, k0, k1)
extern "C" float plait_normal32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) noexcept __attribute__((const));

namespace plait {

// Four counters, each word in the low half of a 64-bit lane (the high halves hold rubbish that no product reads).
struct Philox4 {
    __m256i c0, c1, c2, c3;

    PLAIT_INLINE void round(__m256i k0, __m256i k1) {
        const __m256i p0 = _mm256_mul_epu32(c0, _mm256_set1_epi64x(PHILOX_M0));
        const __m256i p1 = _mm256_mul_epu32(c2, _mm256_set1_epi64x(PHILOX_M1));
        c0 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), c1), k0);
        c1 = p1;
        c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), c3), k1);
        c3 = p0;
    }
};

static uint32_t philox32_one(uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) asm("plait_philox32");
static uint64_t philox64_one(uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) asm("plait_philox64");
static float normal32_one(uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t) asm("plait_normal32");
static __m256 normal32_eight(__m256i, __m256i, uint32_t, uint32_t, uint32_t, uint32_t) asm("_ZGVdN8vvuuuu_plait_normal32");
static __m256i philox32_eight(__m256i, __m256i, uint32_t, uint32_t, uint32_t, uint32_t) asm("_ZGVdN8vvuuuu_plait_philox32");
static __m256i philox64_four(__m128i, __m128i, uint32_t, uint32_t, uint32_t, uint32_t) asm("_ZGVdN4vvuuuu_plait_philox64");

__attribute__((used)) static uint32_t philox32_one(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return uint32_t(philox(c0, c1, c2, c3, k0, k1));
}
__attribute__((used)) static uint64_t philox64_one(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return philox(c0, c1, c2, c3, k0, k1);
}
__attribute__((used)) static float normal32_one(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    const uint64_t w = philox(c0, c1, c2, c3, k0, k1);
    return normal<float>(uint32_t(w), uint32_t(w >> 32));
}
// Eight counters: the even ones stay where they are, the odd ones move down.
struct Philox8 {
    Philox4 even, odd;

    PLAIT_INLINE Philox8(__m256i c0, __m256i c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1)
        : even{c0, c1, _mm256_set1_epi64x(c2), _mm256_set1_epi64x(c3)},
          odd{_mm256_srli_epi64(c0, 32), _mm256_srli_epi64(c1, 32), even.c2, even.c3} {
        __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
        for (int n = 0; n < 10; ++n) {
            even.round(key0, key1);
            odd.round(key0, key1);
            key0 = _mm256_add_epi32(key0, _mm256_set1_epi64x(PHILOX_W0));
            key1 = _mm256_add_epi32(key1, _mm256_set1_epi64x(PHILOX_W1));
        }
    }
    PLAIT_INLINE __m256i word0() const { return _mm256_blend_epi32(even.c0, _mm256_slli_epi64(odd.c0, 32), 0xaa); }
    PLAIT_INLINE __m256i word1() const { return _mm256_blend_epi32(even.c1, _mm256_slli_epi64(odd.c1, 32), 0xaa); }
};
__attribute__((used)) static __m256i philox32_eight(__m256i c0, __m256i c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return Philox8(c0, c1, c2, c3, k0, k1).word0();
}
__attribute__((used)) static __m256 normal32_eight(__m256i c0, __m256i c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    const Philox8 words(c0, c1, c2, c3, k0, k1);
    alignas(32) uint32_t w0[8], w1[8];
    alignas(32) float out[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(w0), words.word0());
    _mm256_store_si256(reinterpret_cast<__m256i*>(w1), words.word1());
#pragma omp simd
    for (int l = 0; l < 8; ++l) out[l] = normal<float>(w0[l], w1[l]);
    return _mm256_load_ps(out);
}
__attribute__((used)) static __m256i philox64_four(__m128i c0, __m128i c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    Philox4 p{_mm256_cvtepu32_epi64(c0), _mm256_cvtepu32_epi64(c1), _mm256_set1_epi64x(c2), _mm256_set1_epi64x(c3)};
    __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
    for (int n = 0; n < 10; ++n) {
        p.round(key0, key1);
        key0 = _mm256_add_epi32(key0, _mm256_set1_epi64x(PHILOX_W0));
        key1 = _mm256_add_epi32(key1, _mm256_set1_epi64x(PHILOX_W1));
    }
    return _mm256_blend_epi32(p.c0, _mm256_slli_epi64(p.c1, 32), 0xaa);
}

}  // namespace plait
#else
static inline uint32_t plait_philox32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return uint32_t(plait::philox(c0, c1, c2, c3, k0, k1));
}
static inline uint64_t plait_philox64(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return plait::philox(c0, c1, c2, c3, k0, k1);
}
static inline float plait_normal32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    const uint64_t w = plait::philox(c0, c1, c2, c3, k0, k1);
    return plait::normal<float>(uint32_t(w), uint32_t(w >> 32));
}
#endif

namespace plait {

struct Counter {
    uint32_t c0, c1, c2, c3, k0, k1;

    PLAIT_INLINE Counter(int64_t seed, int64_t offset, int64_t index, uint32_t draw)
        : c0(uint32_t(uint64_t(index))), c1(uint32_t(uint64_t(index) >> 32)), c2(uint32_t(uint64_t(offset))), c3(draw),
          k0(uint32_t(uint64_t(seed))), k1(uint32_t(uint64_t(seed) >> 32)) {}
    PLAIT_INLINE uint32_t word() const { return plait_philox32(c0, c1, c2, c3, k0, k1); }
    PLAIT_INLINE float normal() const { return plait_normal32(c0, c1, c2, c3, k0, k1); }
    PLAIT_INLINE uint64_t words() const { return plait_philox64(c0, c1, c2, c3, k0, k1); }
};

template <class T>
PLAIT_INLINE inline T rand(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    const Counter counter(seed, offset, index, draw);
    if constexpr (sizeof(T) == 8) {
        const uint64_t w = counter.words();
        return T(wide_from_i64(int64_t((w << 32 | w >> 32) >> 11))) * T(0x1p-53);
    } else {
        return unit_f32(counter.word());
    }
}

template <class T>
PLAIT_INLINE inline T randn(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    const Counter counter(seed, offset, index, draw);
    if constexpr (sizeof(T) == 8) {
        const uint64_t w = counter.words();
        return normal<T>(uint32_t(w), uint32_t(w >> 32));
    } else {
        return counter.normal();
    }
}

template <class T>
PLAIT_INLINE inline T randbits(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    const Counter counter(seed, offset, index, draw);
    if constexpr (sizeof(T) == 8)
        return T(counter.words() >> 1);
    else
        return T(counter.word() >> 1);
}

}  // namespace plait
