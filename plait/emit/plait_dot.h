// Matrix products of tiles, C[M,N] += A[M,K] * B[K,N]: B is packed into a panel of COLS columns that stays in the first cache,
// and a block of ROWS rows by COLS columns of C is kept in registers while k runs. Vectors are those of the compiler's vector
// extensions; their width follows from the target's macros.
#pragma once

namespace plait {

#if defined(__AVX512F__)
constexpr int VECTOR = 64, DOT_ROWS = 12;
#elif defined(__AVX__)
constexpr int VECTOR = 32, DOT_ROWS = 6;
#elif defined(__aarch64__)
constexpr int VECTOR = 16, DOT_ROWS = 8;
#else
constexpr int VECTOR = 16, DOT_ROWS = 4;
#endif

// -ffp-contract=off holds for the rest of a kernel; in sums of products a fused step only adds accuracy
#if defined(__clang__)
#define PLAIT_CONTRACT
#define PLAIT_CONTRACT_HERE _Pragma("clang fp contract(fast)")
#else
#define PLAIT_CONTRACT __attribute__((optimize("fp-contract=fast")))
#define PLAIT_CONTRACT_HERE
#endif

template <class T>
constexpr int64_t COLS = 2 * VECTOR / int64_t(sizeof(T));
constexpr int64_t DEPTH = 256;  // of k in a panel: COLS * DEPTH elements are half a first-level cache
constexpr int64_t ROW_DEPTH = 4096;  // of k, when C has one row

template <class T>
constexpr int64_t padded(int64_t n) {
    return (n + COLS<T> - 1) / COLS<T> * COLS<T>;
}
// Points of a loop over arrays whose last vector may be more than they hold. Rows of arrays are padded to twice that.
constexpr int64_t whole_vectors(int64_t n) {
    constexpr int64_t most = VECTOR / 4;
    return (n + most - 1) / most * most;
}
constexpr int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }
// Where in an arena the next array begins, after one of n elements.
template <class T>
constexpr int64_t behind(int64_t at, int64_t n) {
    return (at + n * int64_t(sizeof(T)) + 127) / 64 * 64;
}
constexpr int64_t whole_rows(int64_t m) { return (m + DOT_ROWS - 1) / DOT_ROWS * DOT_ROWS; }
constexpr int64_t at_most_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Elements of working memory that dot() wants for a tile: a panel, which is used before the next one is packed, and rows.
template <class T>
constexpr int64_t dot_room(int64_t m, int64_t k, int64_t pieces) {
    return most_of(at_most_of(k * pieces, DEPTH) * (COLS<T> + whole_rows(m)), at_most_of(k, ROW_DEPTH)) + 16;
}

// Vectors that may lie anywhere an element may.
template <class T, int BYTES>
struct VectorOf;
template <int BYTES>
struct VectorOf<float, BYTES> {
    typedef float type __attribute__((vector_size(BYTES), aligned(4), may_alias));
};
template <int BYTES>
struct VectorOf<double, BYTES> {
    typedef double type __attribute__((vector_size(BYTES), aligned(8), may_alias));
};

// Where a factor lies and how an element of it is read.
#define PLAIT_FACTOR(NAME, MEMORY, VALUE, READ)                          \
    struct NAME {                                                        \
        using Memory = MEMORY;                                           \
        using Value = VALUE;                                             \
        static PLAIT_INLINE VALUE get(MEMORY x) { return READ; }         \
    };
PLAIT_FACTOR(Of_f32, float, float, x)
PLAIT_FACTOR(Of_f64, double, double, x)
PLAIT_FACTOR(Of_bf16, uint16_t, float, from_bf16(x))
PLAIT_FACTOR(Of_f16, uint16_t, float, from_f16(x))
PLAIT_FACTOR(Of_f8e4m3, uint8_t, float, from_f8e4m3(x))
PLAIT_FACTOR(Of_f8e5m2, uint8_t, float, from_f8e5m2(x))
#undef PLAIT_FACTOR

template <class F>
struct Factor {
    const typename F::Memory* at;
    int64_t row, col;  // strides
    int64_t jump;  // between pieces of the summed dim
};

// ---------------------------------------------------------------- arrays of a tile

template <class T>
inline void fill(T* to, int64_t n, T value) {
    for (int64_t i = 0; i < n; ++i) to[i] = value;
}

// Rules on whole vectors: T is a number's type, V that of a vector of them.
template <class T, class V>
PLAIT_INLINE inline V combined(SumRule<T>, V a, V x) {
    return a + x;
}
template <class T, class V>
PLAIT_INLINE inline V combined(ProdRule<T>, V a, V x) {
    return a * x;
}
template <class T, class V>
PLAIT_INLINE inline V combined(MaxRule<T>, V a, V x) {
    return (x > a) | (x != x) ? x : a;
}
template <class T, class V>
PLAIT_INLINE inline V combined(MinRule<T>, V a, V x) {
    return (x < a) | (x != x) ? x : a;
}

// All lanes of a vector combined, in halves.
template <class Rule, class T, int BYTES>
PLAIT_INLINE inline T folded(typename VectorOf<T, BYTES>::type x) {
    if constexpr (BYTES == int(sizeof(T))) {
        return x[0];
    } else {
        typename VectorOf<T, BYTES / 2>::type low, high;
        __builtin_memcpy(&low, &x, BYTES / 2);
        __builtin_memcpy(&high, reinterpret_cast<const char*>(&x) + BYTES / 2, BYTES / 2);
        return folded<Rule, T, BYTES / 2>(combined(Rule{}, low, high));
    }
}

// n neighbours combined by a rule, lanes in their own type and what comes of them in the Total type. They begin a row of an
// array, so that the lanes up to the next whole vector can be read.
template <template <class> class Rule, class Total, class T>
inline Total along(const T* x, int64_t n) {
    Total total = Rule<Total>::identity();
    if constexpr (std::is_floating_point_v<T>) {
        using V = typename VectorOf<T, VECTOR>::type;
        constexpr int64_t w = VECTOR / int64_t(sizeof(T)), parts = LANES / w;
        const auto at = [x](int64_t i) { return *reinterpret_cast<const V*>(x + i); };
        for (int64_t i = 0; i < n;) {
            const int64_t end = lesser(n, i + SETTLE);
            V all = V{} + Rule<T>::identity();
            if (end - i >= LANES) {
                V part[parts];
                for (int p = 0; p < parts; ++p) part[p] = at(i + p * w);
                for (i += LANES; i + LANES <= end; i += LANES)
                    for (int p = 0; p < parts; ++p) part[p] = combined(Rule<T>{}, part[p], at(i + p * w));
                for (int p = 0; p < parts; ++p) all = combined(Rule<T>{}, all, part[p]);
            }
            for (; i + w <= end; i += w) all = combined(Rule<T>{}, all, at(i));
            if (i < end) {
                V last = at(i);
                for (int l = 0; l < w; ++l) last[l] = i + l < end ? last[l] : Rule<T>::identity();
                all = combined(Rule<T>{}, all, last);
                i = end;
            }
            total = Rule<Total>::combine(total, Total(folded<Rule<T>, T, VECTOR>(all)));
        }
    } else {
        for (int64_t i = 0; i < n; ++i) total = Rule<Total>::combine(total, x[i]);
    }
    return total;
}

// ---------------------------------------------------------------- the innermost block

// One point of the summed dim: a row of MR elements times one of NV vectors.
template <class T, int MR, int NV>
PLAIT_INLINE PLAIT_CONTRACT inline void dot_point(
    typename VectorOf<T, VECTOR>::type (&sum)[MR][NV], const T* a, int64_t row, const T* b) {
    PLAIT_CONTRACT_HERE
    using V = typename VectorOf<T, VECTOR>::type;
    V x[NV];
#pragma GCC unroll 2
    for (int j = 0; j < NV; ++j) x[j] = *reinterpret_cast<const V*>(b + j * (VECTOR / int64_t(sizeof(T))));
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
        const T y = a[i * row];
#pragma GCC unroll 2
        for (int j = 0; j < NV; ++j) sum[i][j] += y * x[j];
    }
}

// MR rows by NV vectors of C, set or (ADD) added to.
template <class T, int MR, int NV>
__attribute__((noinline)) PLAIT_CONTRACT void dot_block(
    bool add, int64_t k, const T* a, int64_t row, int64_t col, const T* b, int64_t b_row, T* c, int64_t c_row) {
    PLAIT_CONTRACT_HERE
    using V = typename VectorOf<T, VECTOR>::type;
    constexpr int64_t w = VECTOR / int64_t(sizeof(T));
    V sum[MR][NV];
    for (int i = 0; i < MR; ++i)
        for (int j = 0; j < NV; ++j) sum[i][j] = V{};
    // rounds of several steps: the processor foresees the end of a loop of few
    constexpr int64_t steps = 4;
    int64_t at = 0;
    for (; at + steps <= k; at += steps)
#pragma GCC unroll 4
        for (int64_t s = 0; s < steps; ++s, a += col, b += b_row) dot_point<T, MR, NV>(sum, a, row, b);
    for (; at < k; ++at, a += col, b += b_row) dot_point<T, MR, NV>(sum, a, row, b);
    if (add) {
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
            for (int j = 0; j < NV; ++j) sum[i][j] += *reinterpret_cast<const V*>(c + i * c_row + j * w);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 2
        for (int j = 0; j < NV; ++j) *reinterpret_cast<V*>(c + i * c_row + j * w) = sum[i][j];
}

template <class T, int MR, int NV>
inline void dot_rows(
    int64_t rows, bool add, int64_t k, const T* a, int64_t row, int64_t col, const T* b, int64_t b_row, T* c, int64_t c_row) {
    if constexpr (MR > 0) {
        if (rows == MR)
            dot_block<T, MR, NV>(add, k, a, row, col, b, b_row, c, c_row);
        else
            dot_rows<T, MR - 1, NV>(rows, add, k, a, row, col, b, b_row, c, c_row);
    }
}

// How many of `left` rows the next block takes: all that fit, but the last two share, because a block of few rows cannot fill
// the pipelines.
constexpr int64_t next_rows(int64_t left) {
    return left >= 2 * DOT_ROWS || left == DOT_ROWS ? DOT_ROWS : left > DOT_ROWS ? (left + 1) / 2 : left;
}
constexpr int64_t row_blocks(int64_t m) { return (m + DOT_ROWS - 1) / DOT_ROWS; }

// ---------------------------------------------------------------- packing

// to[k][lanes] = from[lane*stride + k], for `lanes` >= n lanes of which those past n are 0; lanes is a multiple of 4.
PLAIT_INLINE inline void transpose4(float* to, int64_t lanes, const float* from, int64_t stride) {
    using V = typename VectorOf<float, 16>::type;
    typedef int32_t I __attribute__((vector_size(16)));
    const V a = *reinterpret_cast<const V*>(from), b = *reinterpret_cast<const V*>(from + stride);
    const V c = *reinterpret_cast<const V*>(from + 2 * stride), d = *reinterpret_cast<const V*>(from + 3 * stride);
#if defined(__clang__)
    const V ab0 = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const V cd0 = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd1 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const V r[4] = {__builtin_shufflevector(ab0, cd0, 0, 1, 4, 5), __builtin_shufflevector(ab0, cd0, 2, 3, 6, 7),
                    __builtin_shufflevector(ab1, cd1, 0, 1, 4, 5), __builtin_shufflevector(ab1, cd1, 2, 3, 6, 7)};
#else
    const I low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, first = {0, 1, 4, 5}, second = {2, 3, 6, 7};
    const V ab0 = __builtin_shuffle(a, b, low), ab1 = __builtin_shuffle(a, b, high);
    const V cd0 = __builtin_shuffle(c, d, low), cd1 = __builtin_shuffle(c, d, high);
    const V r[4] = {__builtin_shuffle(ab0, cd0, first), __builtin_shuffle(ab0, cd0, second),
                    __builtin_shuffle(ab1, cd1, first), __builtin_shuffle(ab1, cd1, second)};
#endif
    for (int i = 0; i < 4; ++i) *reinterpret_cast<V*>(to + i * lanes) = r[i];
}

template <class T>
inline void transpose(T* to, int64_t lanes, const T* from, int64_t stride, int64_t n, int64_t k) {
    int64_t lane = 0;
    if constexpr (sizeof(T) == 4) {
        for (; lane + 4 <= n; lane += 4) {
            const T* const rows = from + lane * stride;
            int64_t i = 0;
            for (; i + 4 <= k; i += 4) transpose4(to + i * lanes + lane, lanes, rows + i, stride);
            for (; i < k; ++i)
                for (int64_t l = 0; l < 4; ++l) to[i * lanes + lane + l] = rows[l * stride + i];
        }
    }
    for (; lane < n; ++lane)
        for (int64_t i = 0; i < k; ++i) to[i * lanes + lane] = from[lane * stride + i];
}

// Lays n <= L columns of k rows side by side: to[i*L + j] = f(i, j), zero for j >= n.
template <int64_t L, class F, class T>
inline void pack(T* to, Factor<F> f, int64_t n, int64_t k) {
    if (n < L)
        for (int64_t i = 0; i < k * L; ++i) to[i] = T(0);
    if (f.row == 1 && f.col != 1) {
        if constexpr (std::is_same_v<typename F::Memory, T>) {
            transpose(to, L, f.at, f.col, n, k);
        } else {
            constexpr int64_t piece = 64;
            alignas(64) T part[L * piece];
            for (int64_t i = 0; i < k; i += piece) {
                const int64_t some = lesser(piece, k - i);
                for (int64_t j = 0; j < n; ++j) {
                    const typename F::Memory* const from = f.at + j * f.col + i;
#pragma omp simd
                    for (int64_t l = 0; l < some; ++l) part[j * piece + l] = F::get(from[l]);
                }
                transpose(to + i * L, L, part, piece, n, some);
            }
        }
    } else if (f.col == 1 && n == L) {
        for (int64_t i = 0; i < k; ++i)
#pragma omp simd
            for (int64_t j = 0; j < L; ++j) to[i * L + j] = F::get(f.at[i * f.row + j]);
    } else {
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < n; ++j) to[i * L + j] = F::get(f.at[i * f.row + j * f.col]);
    }
}

// ---------------------------------------------------------------- one row of C: no packing, B is read once

// c[j] += sum of a[i] * b(i, j); COL is the columns' stride, or 0 where b.col says it.
template <class B, int64_t COL, class T>
inline void dot_rows_of(T* c, const T* a, Factor<B> b, int64_t n, int64_t k) {
    const int64_t col = COL ? COL : b.col;
    int64_t i = 0;
    for (; i + 4 <= k; i += 4) {
        const typename B::Memory *const b0 = b.at + i * b.row, *const b1 = b0 + b.row, *const b2 = b1 + b.row,
                                       *const b3 = b2 + b.row;
        const T x0 = a[i], x1 = a[i + 1], x2 = a[i + 2], x3 = a[i + 3];
        // rows are pages apart, across which the processor does not look ahead
        if (COL == 1 && i + 12 <= k)
            for (int64_t j = 0; j < n; j += 64 / int64_t(sizeof(*b0)))
                for (int64_t ahead = 8; ahead < 12; ++ahead) __builtin_prefetch(b0 + ahead * b.row + j);
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
            const T low = fma(x1, B::get(b1[j * col]), x0 * B::get(b0[j * col]));
            const T high = fma(x3, B::get(b3[j * col]), x2 * B::get(b2[j * col]));
            c[j] += low + high;
        }
    }
    for (; i < k; ++i)
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) c[j] = fma(a[i], B::get(b.at[i * b.row + j * col]), c[j]);
}

// c[j] += the product of a and column j of b, for J columns at once whose elements are neighbours along k.
template <int J, class B, class T>
PLAIT_INLINE inline void dot_columns(T* c, const T* a, Factor<B> b, int64_t k) {
    constexpr int64_t lanes = LANES / 2;
    T part[J][lanes];
    for (int j = 0; j < J; ++j)
        for (int l = 0; l < lanes; ++l) part[j][l] = T(0);
    int64_t i = 0;
    for (; i + lanes <= k; i += lanes) {
#pragma GCC unroll 8
        for (int j = 0; j < J; ++j)
#pragma omp simd
            for (int64_t l = 0; l < lanes; ++l) part[j][l] = fma(a[i + l], B::get(b.at[j * b.col + i + l]), part[j][l]);
    }
    for (int j = 0; j < J; ++j) {
        for (int64_t l = 0; i + l < k; ++l) part[j][l] = fma(a[i + l], B::get(b.at[j * b.col + i + l]), part[j][l]);
        c[j] += across(part[j], lanes, [](T x, T y) { return x + y; });
    }
}
template <class B, class T>
inline void dot_columns_of(T* c, const T* a, Factor<B> b, int64_t n, int64_t k) {
    int64_t j = 0;
    for (; j + 4 <= n; j += 4) dot_columns<4, B>(c + j, a, Factor<B>{b.at + j * b.col, 1, b.col, 0}, k);
    for (; j < n; ++j) dot_columns<1, B>(c + j, a, Factor<B>{b.at + j * b.col, 1, b.col, 0}, k);
}

template <class A, class B, class T>
__attribute__((noinline)) void dot_row(T* c, Factor<A> a, Factor<B> b, int64_t n, int64_t k, T* room) {
    for (int64_t k0 = 0; k0 < k; k0 += ROW_DEPTH) {
        const int64_t depth = lesser(ROW_DEPTH, k - k0);
        const T* row = room;
        if constexpr (std::is_same_v<typename A::Memory, T>) {
            if (a.col == 1) row = a.at + k0;
        }
        if (row == room)
            for (int64_t i = 0; i < depth; ++i) room[i] = A::get(a.at[(k0 + i) * a.col]);
        const typename B::Memory* const from = b.at + k0 * b.row;
        if (b.row == 1)
            dot_columns_of<B>(c, row, Factor<B>{from, 1, b.col, 0}, n, depth);
        else if (b.col == 1)
            dot_rows_of<B, 1>(c, row, Factor<B>{from, b.row, 1, 0}, n, depth);
        else
            dot_rows_of<B, 0>(c, row, Factor<B>{from, b.row, b.col, 0}, n, depth);
    }
}

// ---------------------------------------------------------------- few rows of C: no packing, what is added up lies in lanes

constexpr int64_t FEW = 8;  // rows; packing a panel of B costs as much as using it for so many

// MR rows by NC columns of C, whose factors' elements are neighbours along k. A lone row has no more to do than to read B, so it
// asks for the next columns early.
template <class T, int MR, int NC>
__attribute__((noinline)) PLAIT_CONTRACT void dot_few_block(
    bool add, int64_t k, const T* a, int64_t row, const T* b, int64_t col, T* c, int64_t c_row) {
    PLAIT_CONTRACT_HERE
    using V = typename VectorOf<T, VECTOR>::type;
    constexpr int64_t w = VECTOR / int64_t(sizeof(T));
    V sum[MR][NC];
    for (int r = 0; r < MR; ++r)
        for (int j = 0; j < NC; ++j) sum[r][j] = V{};
    int64_t i = 0;
    for (; i + w <= k; i += w) {
        V x[NC];
#pragma GCC unroll 8
        for (int j = 0; j < NC; ++j) {
            x[j] = *reinterpret_cast<const V*>(b + j * col + i);
            if (MR == 1) __builtin_prefetch(b + (j + NC) * col + i);
        }
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const V y = *reinterpret_cast<const V*>(a + r * row + i);
#pragma GCC unroll 8
            for (int j = 0; j < NC; ++j) sum[r][j] += y * x[j];
        }
    }
    for (int r = 0; r < MR; ++r)
        for (int j = 0; j < NC; ++j) {
            T total = folded<SumRule<T>, T, VECTOR>(sum[r][j]);
            for (int64_t l = i; l < k; ++l) total += a[r * row + l] * b[j * col + l];
            c[r * c_row + j] = add ? c[r * c_row + j] + total : total;
        }
}

template <class T, int MR, int NC>
inline void dot_few_columns(bool add, int64_t n, int64_t k, const T* a, int64_t row, const T* b, int64_t col, T* c, int64_t c_row) {
    int64_t j = 0;
    for (; j + NC <= n; j += NC) dot_few_block<T, MR, NC>(add, k, a, row, b + j * col, col, c + j, c_row);
    if constexpr (NC > 1) {
        if (j < n) dot_few_columns<T, MR, 1>(add, n - j, k, a, row, b + j * col, col, c + j, c_row);
    }
}

// All rows of some columns before the next ones, so that B is read from memory once.
template <class T>
inline void dot_few(bool add, int64_t m, int64_t n, int64_t k, const T* a, int64_t row, const T* b, int64_t col, T* c, int64_t c_row) {
    constexpr int64_t some = 12;  // columns
    if (m == 1) return dot_few_columns<T, 1, 4>(add, n, k, a, row, b, col, c, c_row);
    if (m == 2) return dot_few_columns<T, 2, 5>(add, n, k, a, row, b, col, c, c_row);
    for (int64_t j = 0; j < n; j += some)
        for (int64_t i = 0, rows; i < m; i += rows) {
            rows = m - i == 4 || m - i > 6 ? 4 : m - i == 2 ? 2 : 3;
            const auto columns = rows == 4 ? dot_few_columns<T, 4, 3> : rows == 3 ? dot_few_columns<T, 3, 3> : dot_few_columns<T, 2, 4>;
            columns(add, lesser(some, n - j), k, a + i * row, row, b + j * col, col, c + i * c_row + j, c_row);
        }
}

// ---------------------------------------------------------------- the whole tile

// Up to so many rows of C read B where it lies, if its columns are neighbours: packing it costs about a block of rows.
constexpr int64_t DIRECT = 4 * DOT_ROWS;

// NV vectors of columns of the tile, from a panel: all rows.
template <class T, int NV>
inline void dot_panel(int64_t m, bool add, int64_t k, const T* a, int64_t row, int64_t col, int64_t block, const T* b, int64_t b_row, T* c,
                      int64_t c_row) {
    for (int64_t i = 0, some; i < m; i += some, c += some * c_row) {
        some = next_rows(m - i);
        dot_rows<T, DOT_ROWS, NV>(some, add, k, a, row, col, b, b_row, c, c_row);
        a += block ? block : some * row;
    }
}

// Lays rows of A side by side, of `pieces` pieces of k each: to[i*pieces*k + p*k + j].
template <class A, class T>
inline void pack_rows(T* to, Factor<A> a, int64_t m, int64_t k, int64_t pieces) {
    for (int64_t i = 0; i < m; ++i)
        for (int64_t p = 0; p < pieces; ++p, to += k) {
            const typename A::Memory* const from = a.at + i * a.row + p * a.jump;
#pragma omp simd
            for (int64_t j = 0; j < k; ++j) to[j] = A::get(from[j]);
        }
}

// One step over the summed dim: `pieces` pieces of k, DEPTH in all unless a piece is longer.
template <class A, class B, class T>
inline void dot_step(bool add, T* c, int64_t c_row, Factor<A> a, Factor<B> b, int64_t m, int64_t n, int64_t k, int64_t pieces, T* panel) {
    constexpr int64_t cols = COLS<T>, half = cols / 2;
    const int64_t depth = pieces * k;
    T* const blocks = panel + depth * cols;
    const T* rows = blocks;
    int64_t row = 1, col = DOT_ROWS, block = DOT_ROWS * depth;
    if (a.col == 1) {
        row = depth;
        col = 1;
        block = 0;
        bool packed = true;
        if constexpr (std::is_same_v<typename A::Memory, T>) {
            if (pieces == 1 || a.jump == k) {
                rows = a.at;
                row = a.row;
                packed = false;
            }
        }
        if (packed) pack_rows(blocks, a, m, k, pieces);
    } else {
        T* to = blocks;
        for (int64_t i = 0, some; i < m; i += some) {
            some = next_rows(m - i);
            for (int64_t p = 0; p < pieces; ++p, to += DOT_ROWS * k)
                pack<DOT_ROWS>(to, Factor<A>{a.at + i * a.row + p * a.jump, a.col, a.row, 0}, some, k);
        }
    }
    for (int64_t j = 0; j < n; j += cols) {
        const typename B::Memory* const from = b.at + j * b.col;
        const int64_t some = lesser(cols, n - j);
        if constexpr (std::is_same_v<typename B::Memory, T>) {
            if (m <= DIRECT && b.col == 1 && some == cols && (pieces == 1 || b.jump == k * b.row)) {
                dot_panel<T, 2>(m, add, depth, rows, row, col, block, from, b.row, c + j, c_row);
                continue;
            }
        }
        if (some <= half) {
            for (int64_t p = 0; p < pieces; ++p)
                pack<half>(panel + p * k * half, Factor<B>{from + p * b.jump, b.row, b.col, 0}, some, k);
            dot_panel<T, 1>(m, add, depth, rows, row, col, block, panel, half, c + j, c_row);
        } else {
            for (int64_t p = 0; p < pieces; ++p)
                pack<cols>(panel + p * k * cols, Factor<B>{from + p * b.jump, b.row, b.col, 0}, some, k);
            dot_panel<T, 2>(m, add, depth, rows, row, col, block, panel, cols, c + j, c_row);
        }
    }
}

// C = A * B, or (add) C += A * B, summed over `pieces` pieces of k points. C has rows c_row apart that are a whole number of
// panels long: columns up to the next panel's are written too. A's strides are of m and k, B's of k and n. `room` is
// dot_room() elements.
template <class A, class B, class T>
__attribute__((noinline)) void dot(
    bool add, T* c, int64_t c_row, Factor<A> a, Factor<B> b, int64_t m, int64_t n, int64_t k, int64_t pieces, T* room) {
    if constexpr (std::is_same_v<typename A::Memory, T> && std::is_same_v<typename B::Memory, T>) {
        if (m <= FEW && a.col == 1 && b.row == 1 && pieces == 1) return dot_few(add, m, n, k, a.at, a.row, b.at, b.col, c, c_row);
    }
    if (m == 1) {
        if (!add) fill(c, n, T(0));
        for (int64_t p = 0; p < pieces; ++p, a.at += a.jump, b.at += b.jump) dot_row(c, a, b, n, k, room);
        return;
    }
    T* const panel = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(room) + 63) / 64 * 64);
    const int64_t most = k < DEPTH ? DEPTH / k : 1;
    for (int64_t p = 0; p < pieces; p += most) {
        for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
            const Factor<A> left{a.at + p * a.jump + k0 * a.col, a.row, a.col, a.jump};
            const Factor<B> right{b.at + p * b.jump + k0 * b.row, b.row, b.col, b.jump};
            dot_step(add, c, c_row, left, right, m, n, lesser(DEPTH, k - k0), lesser(most, pieces - p), panel);
            add = true;
        }
    }
}

}  // namespace plait
