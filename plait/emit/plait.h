// What every C++ kernel of plait shares: work sharing, vector loops, index arithmetic. Written for g++ >= 9 and clang,
// with no intrinsics per instruction set: loops are left to the compiler's vectoriser, so everything is branch-free.
// Every kernel pays for what is included here, so it is little: <cmath> and <immintrin.h> alone cost a second.
#pragma once
#include <limits>
#include <stdint.h>
#include <stdlib.h>
#include <type_traits>
#ifdef _OPENMP
#include <omp.h>
#endif

#define PLAIT_INLINE __attribute__((always_inline))

namespace plait {

template <class To, class From>
PLAIT_INLINE inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}

template <class T>
PLAIT_INLINE inline T lesser(T a, T b) {
    return b < a ? b : a;
}

// The C library's functions, overloaded, without its header.
namespace c {
#define PLAIT_C1(NAME)                                                         \
    PLAIT_INLINE inline float NAME(float x) { return __builtin_##NAME##f(x); } \
    PLAIT_INLINE inline double NAME(double x) { return __builtin_##NAME(x); }
#define PLAIT_C2(NAME)                                                                     \
    PLAIT_INLINE inline float NAME(float x, float y) { return __builtin_##NAME##f(x, y); } \
    PLAIT_INLINE inline double NAME(double x, double y) { return __builtin_##NAME(x, y); }
PLAIT_C1(fabs)
PLAIT_C1(sqrt)
PLAIT_C1(floor)
PLAIT_C1(ceil)
PLAIT_C1(trunc)
PLAIT_C1(rint)
PLAIT_C1(exp)
PLAIT_C1(exp2)
PLAIT_C1(expm1)
PLAIT_C1(log)
PLAIT_C1(log2)
PLAIT_C1(log10)
PLAIT_C1(log1p)
PLAIT_C1(sin)
PLAIT_C1(cos)
PLAIT_C1(tan)
PLAIT_C1(asin)
PLAIT_C1(acos)
PLAIT_C1(atan)
PLAIT_C1(sinh)
PLAIT_C1(cosh)
PLAIT_C1(tanh)
PLAIT_C1(asinh)
PLAIT_C1(acosh)
PLAIT_C1(atanh)
PLAIT_C1(erf)
PLAIT_C1(erfc)
PLAIT_C2(copysign)
PLAIT_C2(nextafter)
PLAIT_C2(fmod)
PLAIT_C2(pow)
PLAIT_C2(atan2)
PLAIT_C2(hypot)
#undef PLAIT_C1
#undef PLAIT_C2
}  // namespace c

// ---------------------------------------------------------------- work sharing

struct Range {
    int64_t begin, end;
};

// One member of the team of threads that runs a kernel.
struct Worker {
    int64_t id, count;

    // This worker's contiguous share of n items. `turn` rotates who gets the short end, for parts with few items.
    Range share(int64_t n, int64_t turn = 0) const {
        const int64_t k = (id + turn) % count;
        return {n * k / count, n * (k + 1) / count};
    }
};

// Runs body(worker) on up to `threads` threads, and on this one alone when `work` element operations do not pay for waking others.
template <class Body>
inline void team(int64_t work, int threads, Body&& body) {
    constexpr int64_t least_work = 32768;
    if (threads <= 1 || work < least_work) {
        body(Worker{0, 1});
        return;
    }
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    body(Worker{omp_get_thread_num(), omp_get_num_threads()});
#else
    body(Worker{0, 1});
#endif
}

// What a kernel reports: 0, or the least 1000 * part + code of its failures.
struct Status {
    int code = 0;

    void report(int part, int fault) {
        if (fault == 0) return;
        const int mine = 1000 * part + fault;
        int seen = __atomic_load_n(&code, __ATOMIC_RELAXED);
        while ((seen == 0 || mine < seen) &&
               !__atomic_compare_exchange_n(&code, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }
};

// Keeps the least failure code of one worker in one part.
inline void raise(int& fault, int code) {
    if (fault == 0 || code < fault) fault = code;
}

// Memory private to one worker.
template <class T>
class Scratch {
  public:
    explicit Scratch(int64_t elems)
        : memory_(static_cast<T*>(::aligned_alloc(64, (static_cast<size_t>(elems) * sizeof(T) + 127) / 64 * 64))) {}
    ~Scratch() { ::free(memory_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    T* data() const { return memory_; }

  private:
    T* memory_;
};

// ---------------------------------------------------------------- index arithmetic (divisors are positive)

PLAIT_INLINE inline int64_t floordiv(int64_t n, int64_t d) {
    const int64_t q = n / d;
    return q - (n % d < 0);
}
PLAIT_INLINE inline int64_t floormod(int64_t n, int64_t d) {
    const int64_t r = n % d;
    return r + (r < 0 ? d : 0);
}
// For n known to be >= 0.
PLAIT_INLINE inline int64_t udiv(int64_t n, int64_t d) { return int64_t(uint64_t(n) / uint64_t(d)); }
PLAIT_INLINE inline int64_t umod(int64_t n, int64_t d) { return int64_t(uint64_t(n) % uint64_t(d)); }
// For n and d known to lie in [0, 2^31): narrow enough for vectors.
PLAIT_INLINE inline int64_t udiv32(int64_t n, int64_t d) { return int64_t(uint32_t(n) / uint32_t(d)); }
PLAIT_INLINE inline int64_t umod32(int64_t n, int64_t d) { return int64_t(uint32_t(n) % uint32_t(d)); }
PLAIT_INLINE inline int64_t ceildiv(int64_t n, int64_t d) { return -floordiv(-n, d); }
PLAIT_INLINE inline bool in_range(int64_t i, int64_t n) { return uint64_t(i) < uint64_t(n); }

// The first i > from where the sign of c*i + r changes, or the greatest integer.
inline int64_t next_flip(int64_t from, int64_t c, int64_t r) {
    const int64_t at = c > 0 ? ceildiv(-r, c) : floordiv(r, -c) + 1;
    return at > from ? at : INT64_MAX;
}
// The first i > from where (c*i + r) // d leaves the value q it has at `from`.
inline int64_t next_quotient(int64_t c, int64_t r, int64_t d, int64_t q) {
    return c > 0 ? ceildiv((q + 1) * d - r, c) : floordiv(r - q * d, -c) + 1;
}

// ---------------------------------------------------------------- vector loops

constexpr int LANES = 32;  // partial results of a reduction; four AVX2 or two AVX-512 vectors of f32
constexpr int64_t SETTLE = 16 * LANES;  // elements between two visits to the accumulators' wide totals

// step(i) for i in [begin, end), in any order.
template <class Step>
PLAIT_INLINE inline void each(int64_t begin, int64_t end, Step&& step) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) step(i);
}

// step(i, lane) for i in [begin, end), neighbours in different lanes; accumulators settle now and then.
template <class Step, class... Accs>
PLAIT_INLINE inline void lanes(int64_t begin, int64_t end, Step&& step, Accs&... accs) {
    while (begin < end) {
        const int64_t stop = lesser(end, begin + SETTLE);
        int64_t i = begin;
        for (; i + LANES <= stop; i += LANES) {
#pragma omp simd
            for (int64_t l = 0; l < LANES; ++l) step(i + l, l);
        }
        const int64_t rest = stop - i;
#pragma omp simd
        for (int64_t l = 0; l < rest; ++l) step(i + l, l);
        (accs.settle(stop - begin), ...);
        begin = stop;
    }
}

// body(integral constants equal to the given flags): one specialised copy of the body for each combination.
template <class Body>
PLAIT_INLINE inline void pick(Body&& body) {
    body();
}
template <class Body, class... Flags>
PLAIT_INLINE inline void pick(Body&& body, bool flag, Flags... rest) {
    if (flag)
        pick([&](auto... more) PLAIT_INLINE { body(std::true_type{}, more...); }, rest...);
    else
        pick([&](auto... more) PLAIT_INLINE { body(std::false_type{}, more...); }, rest...);
}

}  // namespace plait

#include "plait_types.h"
#include "plait_math.h"
#include "plait_reduce.h"
