// Sixteen lanes in smaller registers: two halves, or four quarters. Without 64-byte registers,
// compilers keep 64-byte vectors in memory and spill around every operation.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int REGISTER = 64;
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif

template <class T, int N> struct Lanes;
template <class T, int N> struct Native {
    typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <class T, int N>
using Vector = typename std::conditional_t<(N * 4 <= REGISTER), Native<T, N>,
                                           std::type_identity<Lanes<T, N>>>::type;

template <class V> constexpr bool halved = false;
template <class T, int N> constexpr bool halved<Lanes<T, N>> = true;

template <class V> static inline V load(const void* p) {
    V v;
    if constexpr (halved<V>) {
        v.lo = load<decltype(v.lo)>(p);
        v.hi = load<decltype(v.hi)>(static_cast<const char*>(p) + sizeof(v.lo));
    } else
        memcpy(&v, p, sizeof(V));
    return v;
}
template <class V> static inline void store(void* p, V v) {
    if constexpr (halved<V>) {
        store(p, v.lo);
        store(static_cast<char*>(p) + sizeof(v.lo), v.hi);
    } else
        memcpy(p, &v, sizeof(V));
}

// Applies f to each register of the arguments.
template <class R, class F, class... V> static inline __attribute__((always_inline)) R
mapped(F f, V... v) {
    if constexpr (halved<R>)
        return {mapped<decltype(R::lo)>(f, v.lo...), mapped<decltype(R::hi)>(f, v.hi...)};
    else
        return (R)f(v...);
}

template <class V, class T> static inline V filled(T x) {
    if constexpr (halved<V>)
        return {filled<decltype(V::lo)>(x), filled<decltype(V::hi)>(x)};
    else
        return x - V{};  // adding would make 0 of -0
}

template <class T, int N> struct Lanes {
    Vector<T, N / 2> lo, hi;

    T operator[](int i) const { return i < N / 2 ? lo[i] : hi[i - N / 2]; }
    template <class U> explicit operator Lanes<U, N>() const {  // the same bits
        return {(Vector<U, N / 2>)lo, (Vector<U, N / 2>)hi};
    }
    friend Lanes operator-(Lanes a) { return {-a.lo, -a.hi}; }

#define SYLVAN_OPERATOR(R, op)                                                       \
    friend Lanes<R, N> operator op(Lanes a, Lanes b) {                               \
        return {(Vector<R, N / 2>)(a.lo op b.lo), (Vector<R, N / 2>)(a.hi op b.hi)}; \
    }                                                                                \
    friend Lanes<R, N> operator op(Lanes a, T b) { return a op filled<Lanes>(b); }   \
    friend Lanes<R, N> operator op(T a, Lanes b) { return filled<Lanes>(a) op b; }
#define SYLVAN_ASSIGNMENT(op)                                       \
    SYLVAN_OPERATOR(T, op)                                          \
    Lanes& operator op## = (Lanes b) { return *this = *this op b; } \
    Lanes& operator op## = (T b) { return *this = *this op b; }
    SYLVAN_ASSIGNMENT(+)
    SYLVAN_ASSIGNMENT(-)
    SYLVAN_ASSIGNMENT(*)
    SYLVAN_ASSIGNMENT(/)
    SYLVAN_ASSIGNMENT(&)
    SYLVAN_ASSIGNMENT(|)
    SYLVAN_ASSIGNMENT(^)
    SYLVAN_OPERATOR(T, >>)
    SYLVAN_OPERATOR(T, <<)
    SYLVAN_OPERATOR(int32_t, <)
    SYLVAN_OPERATOR(int32_t, >)
    SYLVAN_OPERATOR(int32_t, <=)
    SYLVAN_OPERATOR(int32_t, >=)
    SYLVAN_OPERATOR(int32_t, ==)
    SYLVAN_OPERATOR(int32_t, !=)
#undef SYLVAN_ASSIGNMENT
#undef SYLVAN_OPERATOR
};

// Lanes of `yes` where the mask is all ones, of `no` where it is all zeros.
template <class M, class V> static inline V select(M mask, V yes, V no) {
    return mapped<V>([](auto m, auto a, auto b) { return m ? a : b; }, mask, yes, no);
}

template <class To, class From> static inline To converted(From v) {  // by value
    if constexpr (halved<To>)
        return {converted<decltype(To::lo)>(v.lo), converted<decltype(To::hi)>(v.hi)};
    else
        return __builtin_convertvector(v, To);
}

// Widens bytes to 32-bit lanes; compilers turn `__builtin_convertvector` into scalar loads here.
template <class S> static inline auto widened_bytes(const S* p) {
#if defined(__AVX512F__)
    __m128i bytes = load<__m128i>(p);
    return std::is_signed_v<S> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
#elif defined(__AVX2__)
    __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return std::is_signed_v<S> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
#else
    constexpr int n = REGISTER / 4;
    typedef std::conditional_t<std::is_signed_v<S>, int16_t, uint16_t> Half;
    typedef std::conditional_t<std::is_signed_v<S>, int32_t, uint32_t> Whole;
    auto halves = __builtin_convertvector(load<typename Native<S, n>::type>(p),
                                          typename Native<Half, n>::type);
    return __builtin_convertvector(halves, typename Native<Whole, n>::type);
#endif
}

// Lanes from and to memory that holds them in fewer bits, as numbers of type S.
template <class S, class V> static inline V widened(const S* p) {
    constexpr int n = sizeof(V) / 4;
    if constexpr (halved<V>)
        return {widened<S, decltype(V::lo)>(p), widened<S, decltype(V::hi)>(p + n / 2)};
    else if constexpr (sizeof(S) == 1 && sizeof(V) == REGISTER) {
        typedef std::conditional_t<std::is_signed_v<S>, int32_t, uint32_t> Whole;
        return __builtin_convertvector((typename Native<Whole, n>::type)widened_bytes(p), V);
    } else
        return __builtin_convertvector(load<typename Native<S, n>::type>(p), V);
}
template <class S, class V> static inline void narrow(S* p, V v) {
    constexpr int n = sizeof(V) / 4;
    if constexpr (halved<V>) {
        narrow(p, v.lo);
        narrow(p + n / 2, v.hi);
    } else
        store(p, __builtin_convertvector(v, typename Native<S, n>::type));
}

// A fixed tree: lane i with lane i + 8, then + 4, + 2, + 1.
template <class V, class F> static inline auto reduce(V v, F f) {
    if constexpr (halved<V>) {
        return reduce(mapped<decltype(v.lo)>(f, v.lo, v.hi), f);
    } else {
        using M = typename Native<int32_t, sizeof(V) / 4>::type;
        if constexpr (sizeof(V) == 64)
            v = f(v, __builtin_shuffle(
                         v, M{8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15}));
        if constexpr (sizeof(V) == 64)
            v = f(v, __builtin_shuffle(v, M{4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7}));
        else if constexpr (sizeof(V) == 32)
            v = f(v, __builtin_shuffle(v, M{4, 5, 6, 7, 4, 5, 6, 7}));
        if constexpr (sizeof(V) == 64)
            v = f(v, __builtin_shuffle(v, M{2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3}));
        else if constexpr (sizeof(V) == 32)
            v = f(v, __builtin_shuffle(v, M{2, 3, 2, 3, 2, 3, 2, 3}));
        else
            v = f(v, __builtin_shuffle(v, M{2, 3, 2, 3}));
        if constexpr (sizeof(V) == 64)
            v = f(v, __builtin_shuffle(v, M{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
        else if constexpr (sizeof(V) == 32)
            v = f(v, __builtin_shuffle(v, M{1, 1, 1, 1, 1, 1, 1, 1}));
        else
            v = f(v, __builtin_shuffle(v, M{1, 1, 1, 1}));
        return v[0];
    }
}
