// Counter-based random numbers: Philox-4x32-10. A block of a draw has four words:
//   counter = (low 32 bits of block, high 32 bits of block, low 32 bits of offset, draw), key = (low, high 32 bits of seed)
// What takes one word shares a block with its neighbours, w = word (index mod 4) of block (index div 4):
//   rand f32 = (w >> 8) * 2^-24; randbits i32 = w >> 1
// All else has a block of its own, number index:
//   rand f64 = ((w0 << 32 | w1) >> 11) * 2^-53; randbits i64 = (w1 << 32 | w0) >> 1
//   randn: sqrt(-2 log(1 - u0)) * cos(2 pi u1), u0 and u1 the f32 numbers of w0 and w1
#pragma once

namespace plait {

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u, PHILOX_W0 = 0x9E3779B9u, PHILOX_W1 = 0xBB67AE85u;

struct Words {
    uint32_t w0, w1, w2, w3;

    PLAIT_INLINE uint64_t low() const { return uint64_t(w1) << 32 | w0; }
    PLAIT_INLINE uint32_t at(uint32_t n) const { return n & 2 ? (n & 1 ? w3 : w2) : (n & 1 ? w1 : w0); }
};

PLAIT_INLINE inline Words philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(c0) * PHILOX_M0, p1 = uint64_t(c2) * PHILOX_M1;
        c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
        c1 = uint32_t(p1);
        c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c3 = uint32_t(p0);
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return {c0, c1, c2, c3};
}

PLAIT_INLINE inline float unit_f32(uint32_t w) { return float(int32_t(w >> 8)) * 0x1p-24f; }

// cos(2 pi u) for u in [0, 1): the quadrant leaves 4u exactly
PLAIT_INLINE inline float cos_turn(float u) {
    const float quadrant = c::rint(4.0f * u), r = (4.0f * u - quadrant) * 0x1.921fb6p+0f, z = r * r;
    const float c = fma(z * z, poly(z, 0x1.55554ap-5f, -0x1.6c0c84p-10f, 0x1.99ffd2p-16f), fma(z, -0.5f, 1.0f));
    const float s = fma(r * z, poly(z, -0x1.555546p-3f, 0x1.110758p-7f, -0x1.994b62p-13f), r);
    const float even = quadrant == 2.0f ? -c : c, odd = quadrant == 1.0f ? -s : s;
    return (quadrant == 1.0f) | (quadrant == 3.0f) ? odd : even;
}
PLAIT_INLINE inline double cos_turn(double u) { return c::cos(2 * PI * u); }

// A normal number by Box and Muller
template <class T>
PLAIT_INLINE inline T normal(uint32_t w0, uint32_t w1) {
    return sqrt(T(-2) * log(T(1) - T(unit_f32(w0)))) * cos_turn(T(unit_f32(w1)));
}

}  // namespace plait

// GCC turns the 32x32-bit products above into shuffles. On AVX2 it is given vector versions instead, under the names that
// the vector function ABI reserves for loops that call these functions.
#if defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__)

#define PLAIT_COUNTER uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1

#pragma omp declare simd notinbranch simdlen(8) uniform(c2, c3, k0, k1)
extern "C" uint32_t plait_philox32(PLAIT_COUNTER, uint32_t which) noexcept __attribute__((const));
#pragma omp declare simd notinbranch simdlen(4) uniform(c2, c3, k0, k1)
extern "C" uint64_t plait_philox64(PLAIT_COUNTER) noexcept __attribute__((const));
#pragma omp declare simd notinbranch simdlen(8) uniform(c2, c3, k0, k1)
extern "C" float plait_normal32(PLAIT_COUNTER) noexcept __attribute__((const));

namespace plait {

typedef uint32_t Words4 __attribute__((vector_size(16)));
typedef uint32_t Words8 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef uint64_t Wide4 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));

// Products of the low halves of 64-bit lanes
PLAIT_INLINE inline Wide4 product(Wide4 a, uint32_t b) {
    return (Wide4)__builtin_ia32_pmuludq256((Ints8)a, (Ints8)(Wide4{} + uint64_t(b)));
}

// Four counters, each word in the low half of a 64-bit lane (the high halves hold rubbish that no product reads).
struct Philox4 {
    Wide4 c0, c1, c2, c3;

    PLAIT_INLINE void round(Wide4 k0, Wide4 k1) {
        const Wide4 p0 = product(c0, PHILOX_M0), p1 = product(c2, PHILOX_M1);
        c0 = (p1 >> 32) ^ c1 ^ k0;
        c1 = p1;
        c2 = (p0 >> 32) ^ c3 ^ k1;
        c3 = p0;
    }
};
// Eight counters: the even ones stay where they are, the odd ones move down.
struct Philox8 {
    Philox4 even, odd;

    PLAIT_INLINE Philox8(Words8 c0, Words8 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1)
        : even{(Wide4)c0, (Wide4)c1, Wide4{} + uint64_t(c2), Wide4{} + uint64_t(c3)},
          odd{(Wide4)c0 >> 32, (Wide4)c1 >> 32, even.c2, even.c3} {
        Wide4 key0 = Wide4{} + uint64_t(k0), key1 = Wide4{} + uint64_t(k1);
        for (int n = 0; n < 10; ++n) {
            even.round(key0, key1);
            odd.round(key0, key1);
            key0 += uint64_t(PHILOX_W0);
            key1 += uint64_t(PHILOX_W1);
        }
    }
    static PLAIT_INLINE Words8 woven(Wide4 even, Wide4 odd) { return (Words8)((even & 0xffffffffu) | (odd << 32)); }
    PLAIT_INLINE Words8 word0() const { return woven(even.c0, odd.c0); }
    PLAIT_INLINE Words8 word1() const { return woven(even.c1, odd.c1); }
    PLAIT_INLINE Words8 word(Words8 which) const {
        const Words8 odd_ones = Words8{} - (which & 1), upper = Words8{} - (which >> 1 & 1);
        const Words8 low = (word1() & odd_ones) | (word0() & ~odd_ones);
        const Words8 high = (woven(even.c3, odd.c3) & odd_ones) | (woven(even.c2, odd.c2) & ~odd_ones);
        return (high & upper) | (low & ~upper);
    }
};

#define PLAIT_USED __attribute__((used)) static
PLAIT_USED uint32_t philox32_one(PLAIT_COUNTER, uint32_t which) asm("plait_philox32");
PLAIT_USED uint64_t philox64_one(PLAIT_COUNTER) asm("plait_philox64");
PLAIT_USED float normal32_one(PLAIT_COUNTER) asm("plait_normal32");

uint32_t philox32_one(PLAIT_COUNTER, uint32_t which) { return philox(c0, c1, c2, c3, k0, k1).at(which); }
uint64_t philox64_one(PLAIT_COUNTER) { return philox(c0, c1, c2, c3, k0, k1).low(); }
float normal32_one(PLAIT_COUNTER) {
    const Words w = philox(c0, c1, c2, c3, k0, k1);
    return normal<float>(w.w0, w.w1);
}
PLAIT_INLINE inline Words8 philox32_eight(Words8 c0, Words8 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
                                          Words8 which) {
    return Philox8(c0, c1, c2, c3, k0, k1).word(which);
}
PLAIT_INLINE inline Wide4 philox64_four(Words4 c0, Words4 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    Philox4 p{__builtin_convertvector(c0, Wide4), __builtin_convertvector(c1, Wide4), Wide4{} + uint64_t(c2),
              Wide4{} + uint64_t(c3)};
    Wide4 key0 = Wide4{} + uint64_t(k0), key1 = Wide4{} + uint64_t(k1);
    for (int n = 0; n < 10; ++n) {
        p.round(key0, key1);
        key0 += uint64_t(PHILOX_W0);
        key1 += uint64_t(PHILOX_W1);
    }
    return (Wide4)Philox8::woven(p.c0, p.c1);
}
PLAIT_INLINE inline Floats8 normal32_eight(Words8 c0, Words8 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    const Philox8 words(c0, c1, c2, c3, k0, k1);
    const Words8 w0 = words.word0(), w1 = words.word1();
    Floats8 out;
    alignas(32) uint32_t first[8], second[8];
    alignas(32) float normals[8];
    __builtin_memcpy(first, &w0, 32);
    __builtin_memcpy(second, &w1, 32);
#pragma omp simd
    for (int l = 0; l < 8; ++l) normals[l] = normal<float>(first[l], second[l]);
    __builtin_memcpy(&out, normals, 32);
    return out;
}

// With AVX-512 GCC calls the versions of that instruction set ("e"), and no others; eight 32-bit lanes fill 256 bits under
// either name, so that they are passed alike.
#define PLAIT_VERSION(ISA)                                                                                          \
    PLAIT_USED Words8 philox32_##ISA(Words8, Words8, uint32_t, uint32_t, uint32_t, uint32_t, Words8) asm(           \
        "_ZGV" #ISA "N8vvuuuuv_plait_philox32");                                                                    \
    PLAIT_USED Wide4 philox64_##ISA(Words4, Words4, uint32_t, uint32_t, uint32_t, uint32_t) asm(                    \
        "_ZGV" #ISA "N4vvuuuu_plait_philox64");                                                                     \
    PLAIT_USED Floats8 normal32_##ISA(Words8, Words8, uint32_t, uint32_t, uint32_t, uint32_t) asm(                  \
        "_ZGV" #ISA "N8vvuuuu_plait_normal32");                                                                     \
    Words8 philox32_##ISA(Words8 c0, Words8 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1, Words8 which) { \
        return philox32_eight(c0, c1, c2, c3, k0, k1, which);                                                       \
    }                                                                                                               \
    Wide4 philox64_##ISA(Words4 c0, Words4 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {                \
        return philox64_four(c0, c1, c2, c3, k0, k1);                                                               \
    }                                                                                                               \
    Floats8 normal32_##ISA(Words8 c0, Words8 c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {              \
        return normal32_eight(c0, c1, c2, c3, k0, k1);                                                              \
    }
#ifdef __AVX512F__
PLAIT_VERSION(e)
#else
PLAIT_VERSION(d)
#endif
#undef PLAIT_VERSION
#undef PLAIT_USED
#undef PLAIT_COUNTER

}  // namespace plait
#else
static inline uint32_t plait_philox32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1,
                                      uint32_t which) {
    return plait::philox(c0, c1, c2, c3, k0, k1).at(which);
}
static inline uint64_t plait_philox64(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    return plait::philox(c0, c1, c2, c3, k0, k1).low();
}
static inline float plait_normal32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
    const plait::Words w = plait::philox(c0, c1, c2, c3, k0, k1);
    return plait::normal<float>(w.w0, w.w1);
}
#endif

namespace plait {

struct Counter {
    uint32_t c0, c1, c2, c3, k0, k1;

    PLAIT_INLINE Counter(int64_t seed, int64_t offset, int64_t index, uint32_t draw)
        : c0(uint32_t(uint64_t(index))), c1(uint32_t(uint64_t(index) >> 32)), c2(uint32_t(uint64_t(offset))), c3(draw),
          k0(uint32_t(uint64_t(seed))), k1(uint32_t(uint64_t(seed) >> 32)) {}
    PLAIT_INLINE uint32_t word(uint32_t which) const { return plait_philox32(c0, c1, c2, c3, k0, k1, which); }
    PLAIT_INLINE float normal() const { return plait_normal32(c0, c1, c2, c3, k0, k1); }
    PLAIT_INLINE uint64_t words() const { return plait_philox64(c0, c1, c2, c3, k0, k1); }
};

template <class T>
PLAIT_INLINE inline T rand(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    if constexpr (sizeof(T) == 8) {
        const uint64_t w = Counter(seed, offset, index, draw).words();
        return T(wide_from_i64(int64_t((w << 32 | w >> 32) >> 11))) * T(0x1p-53);
    } else {
        return unit_f32(Counter(seed, offset, index >> 2, draw).word(uint32_t(index) & 3));
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
    if constexpr (sizeof(T) == 8)
        return T(Counter(seed, offset, index, draw).words() >> 1);
    else
        return T(Counter(seed, offset, index >> 2, draw).word(uint32_t(index) & 3) >> 1);
}

}  // namespace plait
