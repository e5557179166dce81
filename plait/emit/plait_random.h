// Counter-based random numbers: Philox-4x32-10. One draw at one linear index is one block of four words:
//   counter = (low 32 bits of index, high 32 bits of index, low 32 bits of offset, draw), key = (low, high 32 bits of seed)
//   rand:  f32 = (w0 >> 8) * 2^-24; f64 = ((w0 << 32 | w1) >> 11) * 2^-53
//   randn: sqrt(-2 log(1 - u0)) * cos(2 pi u1), u0 and u1 the f32 numbers of w0 and w1
//   randbits: i64 = (w1 << 32 | w0) >> 1, i32 = w0 >> 1
#pragma once

namespace plait {

struct Words {
    uint32_t w0, w1, w2, w3;
};

PLAIT_INLINE inline Words philox(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    uint32_t c0 = uint32_t(uint64_t(index)), c1 = uint32_t(uint64_t(index) >> 32), c2 = uint32_t(uint64_t(offset)), c3 = draw;
    uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
        const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1);
        c3 = uint32_t(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {c0, c1, c2, c3};
}

PLAIT_INLINE inline float unit_f32(uint32_t w) { return float(int32_t(w >> 8)) * 0x1p-24f; }

template <class T>
PLAIT_INLINE inline T rand(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    const Words w = philox(seed, offset, index, draw);
    if constexpr (sizeof(T) == 8)
        return T(wide_from_i64(int64_t((uint64_t(w.w0) << 32 | w.w1) >> 11))) * T(0x1p-53);
    else
        return unit_f32(w.w0);
}

template <class T>
PLAIT_INLINE inline T randn(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    const Words w = philox(seed, offset, index, draw);
    const T u0 = unit_f32(w.w0), u1 = unit_f32(w.w1);
    return sqrt(T(-2) * log(T(1) - u0)) * cos(T(6.283185307179586476925) * u1);
}

template <class T>
PLAIT_INLINE inline T randbits(int64_t seed, int64_t offset, int64_t index, uint32_t draw) {
    const Words w = philox(seed, offset, index, draw);
    if constexpr (sizeof(T) == 8)
        return T((uint64_t(w.w1) << 32 | w.w0) >> 1);
    else
        return T(w.w0 >> 1);
}

}  // namespace plait
