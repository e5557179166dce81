// Accumulators. Each holds L lanes; add(l, x) takes one element into lane l; settle(n) is told after every n elements;
// result() combines all lanes, result(l) reads one (when lanes are different points of a grid dim).
#pragma once

namespace plait {

template <class T>
struct Wide {
    using type = T;
};
template <>
struct Wide<float> {
    using type = double;
};

// Folds lanes in halves (L is a power of two, or one lane for each point of a strip): combine(a, b) of two lanes.
template <class T, class Combine>
PLAIT_INLINE inline T across(const T* lanes, int count, Combine&& combine) {
    T part[LANES];
    if (count < LANES) {
        T all = lanes[0];
        for (int l = 1; l < count; ++l) all = combine(all, lanes[l]);
        return all;
    }
    for (int l = 0; l < LANES; ++l) part[l] = lanes[l];
    int done = LANES;
    for (; done + LANES <= count; done += LANES)
        for (int l = 0; l < LANES; ++l) part[l] = combine(part[l], lanes[done + l]);
    for (int l = 0; done + l < count; ++l) part[l] = combine(part[l], lanes[done + l]);
#pragma GCC unroll 8
    for (int width = LANES / 2; width > 0; width /= 2)
#pragma omp simd
        for (int l = 0; l < width; ++l) part[l] = combine(part[l], part[l + width]);
    return part[0];
}

// Floats add up in their own type for a few elements a lane, then in double: 16 times at most, so that rounding stays below
// that of eager's cascade.
template <class T, int L>
struct Sum {
    using Total = typename Wide<T>::type;
    T lane[L];
    Total total[L];
    int64_t pending = 0;

    Sum() {
        for (int l = 0; l < L; ++l) {
            lane[l] = T(0);
            total[l] = Total(0);
        }
    }
    PLAIT_INLINE void add(int64_t l, T x) { lane[l] = T(lane[l] + x); }
    PLAIT_INLINE void settle(int64_t n) {
        pending += n;
        if (pending < 16 * int64_t(L)) return;
        pending = 0;
#pragma omp simd
        for (int l = 0; l < L; ++l) {
            total[l] += lane[l];
            lane[l] = T(0);
        }
    }
    PLAIT_INLINE T result(int64_t l) const { return T(total[l] + lane[l]); }
    PLAIT_INLINE T result() const {
        Total all[L];
        for (int l = 0; l < L; ++l) all[l] = total[l] + lane[l];
        return T(across(all, L, [](Total a, Total b) { return a + b; }));
    }
};

// One identity and one combining rule make an accumulator.
template <class T, int L, class Rule>
struct Fold {
    T lane[L];

    Fold() {
        for (int l = 0; l < L; ++l) lane[l] = Rule::identity();
    }
    PLAIT_INLINE void add(int64_t l, T x) { lane[l] = Rule::combine(lane[l], x); }
    PLAIT_INLINE void settle(int64_t) {}
    PLAIT_INLINE T result(int64_t l) const { return lane[l]; }
    PLAIT_INLINE T result() const {
        return across(lane, L, [](T a, T b) { return Rule::combine(a, b); });
    }
};

template <class T>
constexpr T lowest() {
    return std::numeric_limits<T>::has_infinity ? -std::numeric_limits<T>::infinity() : std::numeric_limits<T>::lowest();
}
template <class T>
constexpr T highest() {
    return std::numeric_limits<T>::has_infinity ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::max();
}

template <class T>
struct ProdRule {
    static constexpr T identity() { return T(1); }
    static PLAIT_INLINE T combine(T a, T x) { return T(a * x); }
};
template <class T>
struct MaxRule {
    static constexpr T identity() { return lowest<T>(); }
    // a NaN stays: nothing compares greater than it
    static PLAIT_INLINE T combine(T a, T x) { return (x > a) | (x != x) ? x : a; }
};
template <class T>
struct MinRule {
    static constexpr T identity() { return highest<T>(); }
    static PLAIT_INLINE T combine(T a, T x) { return (x < a) | (x != x) ? x : a; }
};
template <class T>
struct AnyRule {
    static constexpr T identity() { return T(0); }
    static PLAIT_INLINE T combine(T a, T x) { return T(a | x); }
};
template <class T>
struct AllRule {
    static constexpr T identity() { return T(1); }
    static PLAIT_INLINE T combine(T a, T x) { return T(a & x); }
};

// Of rows so short that few elements meet in a lane: no wider total.
template <class T>
struct SumRule {
    static constexpr T identity() { return T(0); }
    static PLAIT_INLINE T combine(T a, T x) { return T(a + x); }
};
// What lanes hold may cancel in full, so they meet in a wider type.
template <class T, int L>
struct ShortSum : Fold<T, L, SumRule<T>> {
    using Fold<T, L, SumRule<T>>::result;
    PLAIT_INLINE T result() const {
        using Total = typename Wide<T>::type;
        Total all[L];
        for (int l = 0; l < L; ++l) all[l] = Total(this->lane[l]);
        return T(across(all, L, [](Total x, Total y) { return Total(x + y); }));
    }
};
template <class T, int L>
using Prod = Fold<T, L, ProdRule<T>>;
template <class T, int L>
using Max = Fold<T, L, MaxRule<T>>;
template <class T, int L>
using Min = Fold<T, L, MinRule<T>>;
template <class T, int L>
using Any = Fold<uint8_t, L, AnyRule<uint8_t>>;
template <class T, int L>
using All = Fold<uint8_t, L, AllRule<uint8_t>>;

// The index of the first extreme; a NaN is more extreme than any number.
template <class T, int L, bool GREATEST>
struct ArgExtreme {
    T lane[L];
    int64_t at[L];

    ArgExtreme() {
        for (int l = 0; l < L; ++l) {
            lane[l] = GREATEST ? lowest<T>() : highest<T>();
            at[l] = INT64_MAX;
        }
    }
    static PLAIT_INLINE bool beats(T x, T a) {
        return ((GREATEST ? x > a : x < a) & (a == a)) | ((x != x) & (a == a));
    }
    PLAIT_INLINE void add(int64_t l, T x, int64_t i) {
        // the identity may be among the elements, so a lane's first element is always taken
        const bool take = beats(x, lane[l]) | (at[l] == INT64_MAX);
        lane[l] = take ? x : lane[l];
        at[l] = take ? i : at[l];
    }
    PLAIT_INLINE void settle(int64_t) {}
    PLAIT_INLINE int64_t result(int64_t l) const { return at[l]; }
    PLAIT_INLINE int64_t result() const {
        int best = 0;
        for (int l = 1; l < L; ++l) {
            const bool same = lane[l] == lane[best] || (lane[l] != lane[l] && lane[best] != lane[best]);
            if (at[l] != INT64_MAX && (at[best] == INT64_MAX || beats(lane[l], lane[best]) || (same && at[l] < at[best])))
                best = l;
        }
        return at[best];
    }
};
template <class T, int L>
using ArgMax = ArgExtreme<T, L, true>;
template <class T, int L>
using ArgMin = ArgExtreme<T, L, false>;

// ---------------------------------------------------------------- inclusive scans: step(l, x) returns the scan at x

template <class T, int L>
struct CumSum {
    typename Wide<T>::type lane[L];
    CumSum() {
        for (int l = 0; l < L; ++l) lane[l] = 0;
    }
    PLAIT_INLINE T step(int64_t l, T x) { return T(lane[l] += x); }
};
template <class T, int L>
struct CumProd {
    typename Wide<T>::type lane[L];
    CumProd() {
        for (int l = 0; l < L; ++l) lane[l] = 1;
    }
    PLAIT_INLINE T step(int64_t l, T x) { return T(lane[l] *= x); }
};
template <class T, int L, class Rule>
struct CumFold {
    T lane[L];
    CumFold() {
        for (int l = 0; l < L; ++l) lane[l] = Rule::identity();
    }
    PLAIT_INLINE T step(int64_t l, T x) { return lane[l] = Rule::combine(lane[l], x); }
};
template <class T, int L>
using CumMax = CumFold<T, L, MaxRule<T>>;
template <class T, int L>
using CumMin = CumFold<T, L, MinRule<T>>;

// log(sum of exp): a running maximum and a sum scaled by it, in double.
template <class T, int L>
struct LogCumSumExp {
    double peak[L], sum[L];
    LogCumSumExp() {
        for (int l = 0; l < L; ++l) {
            peak[l] = -std::numeric_limits<double>::infinity();
            sum[l] = 0;
        }
    }
    PLAIT_INLINE T step(int64_t l, T element) {
        const double x = element, high = (x > peak[l]) | (x != x) ? x : peak[l];
        // equal infinities would subtract to NaN
        const double before = peak[l] == high ? 1.0 : c::exp(peak[l] - high);
        const double now = x == high ? 1.0 : c::exp(x - high);
        const bool empty = high == -std::numeric_limits<double>::infinity();
        sum[l] = empty ? 0.0 : sum[l] * before + now;
        peak[l] = high;
        return T(empty ? high : high + c::log(sum[l]));
    }
};

}  // namespace plait
