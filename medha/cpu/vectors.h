// What the CPU's kernels share: vectors of GCC and clang, as wide as the machine has them, and numbers of 16 bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__F16C__)  // and so every CPU with AVX-512
#include <immintrin.h>
#endif

namespace {

#if !defined(MEDHA_WIDTH) && defined(__AVX512F__)
#define MEDHA_WIDTH 16
#elif !defined(MEDHA_WIDTH) && defined(__AVX__)
#define MEDHA_WIDTH 8
#elif !defined(MEDHA_WIDTH)
#define MEDHA_WIDTH 4
#endif
#if MEDHA_WIDTH == 16 && defined(__AVX512BF16__)
#define MEDHA_PAIRS 1  // it multiplies bfloat16, two numbers at once
#else
#define MEDHA_PAIRS 0
#endif
#if MEDHA_PAIRS && MEDHA_MAY_TILE && defined(__AMX_BF16__)
#define MEDHA_TILES 1
#else
#define MEDHA_TILES 0
#endif
constexpr int W = MEDHA_WIDTH, STRIP = W == 16 ? 12 : 6;  // floats of a vector; most queries of a strip
typedef float Floats __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * W), aligned(4), may_alias));

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline void store(float* at, Floats x) { *reinterpret_cast<Floats*>(at) = x; }

template <int S, int... I>
inline Floats turned(Floats x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I + S) % W...);
}
inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }
template <int S = W / 2>
inline float largest(Floats x) {
    x = larger(x, turned<S>(x, std::make_integer_sequence<int, W>{}));
    if constexpr (S > 1) return largest<S / 2>(x);
    return x[0];
}
template <int S = W / 2>
inline float sum_of(Floats x) {
    x += turned<S>(x, std::make_integer_sequence<int, W>{});
    if constexpr (S > 1) return sum_of<S / 2>(x);
    return x[0];
}

// Every second block of SIZE floats of each SPAN of x, then of y; the first one is block ODD.
template <int SIZE, int SPAN, int ODD>
constexpr int second(int i) {
    const int block = i % SPAN / SIZE, half = SPAN / SIZE / 2;
    return i / SPAN * SPAN + (2 * (block % half) + ODD) * SIZE + i % SIZE + (block < half ? 0 : W);
}
// The sums of W vectors; their floats are added within 16 bytes, which is where CPUs shuffle at once, and then across.
template <int NUM = W, int... I>
inline Floats sums_of(Floats (&x)[W], std::integer_sequence<int, I...> all) {
    constexpr int SIZE = NUM > W / 4 ? 1 : 4, SPAN = SIZE == 1 ? 4 : W;
#pragma GCC unroll 8
    for (int i = 0; i < NUM / 2; i++)
        x[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], second<SIZE, SPAN, 0>(I)...) +
               __builtin_shufflevector(x[2 * i], x[2 * i + 1], second<SIZE, SPAN, 1>(I)...);
    if constexpr (NUM > 2) return sums_of<NUM / 2>(x, all);
    return x[0];
}

// W vectors, interleaved log2(W) times: each time the bits of (vector, place in it) turn by one.
template <int... I>
inline void transpose(Floats (&x)[W], std::integer_sequence<int, I...>) {
#pragma GCC unroll 4
    for (int times = 1; times < W; times *= 2) {
        Floats y[W];
#pragma GCC unroll 8
        for (int i = 0; i < W / 2; i++) {
            y[2 * i] = __builtin_shufflevector(x[i], x[i + W / 2], (I / 2 + I % 2 * W)...);
            y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + W / 2], (I / 2 + I % 2 * W + W / 2)...);
        }
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) x[i] = y[i];
    }
}

struct BFloat16 {
    uint16_t bits;
};
typedef _Float16 Float16;

inline float widened(float x) { return x; }
inline float widened(Float16 x) { return x; }
inline float widened(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline Floats wide(const float* at) { return load(at); }
template <class T>
inline Floats wide(const T* at) {
    Floats x;
    for (int i = 0; i < W; i++) x[i] = widened(at[i]);
    return x;
}
#if MEDHA_WIDTH == 16 && defined(__AVX512F__)
inline Floats wide(const Float16* at) {  // GCC 12 would widen one by one
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at))));
}
#elif MEDHA_WIDTH == 8 && defined(__F16C__)
inline Floats wide(const Float16* at) {
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
#endif
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, Float16* to) { *to = Float16(x); }
inline void narrow(float x, BFloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void narrow(Floats x, float* to) { store(to, x); }
template <class T>
inline void narrow(Floats x, T* to) {
    for (int i = 0; i < W; i++) narrow(x[i], to + i);
}

// 2^x for x <= 126, within 2e-7 of it, 1 of 0, and 0 where that is no normal number. The polynomials are minimax fits.
#if MEDHA_WIDTH == 16 && defined(__AVX512DQ__)
inline Floats exp2_(Floats x) {
    const __m512 whole = reinterpret_cast<__m512>(x);
    const Floats rest = reinterpret_cast<Floats>(_mm512_reduce_ps(whole, _MM_FROUND_TO_NEG_INF));  // 0 to 1, 0 of infinity
    Floats power = rest * 1.86713169e-03f + 9.01702690e-03f;
    power = power * rest + 5.57999156e-02f;
    power = power * rest + 2.40164450e-01f;
    power = power * rest + 6.93151312e-01f;
    power = power * rest + 1.0f;
    const auto is_normal = _mm512_cmp_ps_mask(whole, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // or not a number
    return reinterpret_cast<Floats>(_mm512_maskz_scalef_ps(is_normal, reinterpret_cast<__m512>(power), whole));
}
#else
inline Floats exp2_(Floats x) {
    const Floats shifted = x + 12582912.0f;  // behind 1.5 * 2^23 the low bits are the rounded number
    const Floats rest = x - (shifted - 12582912.0f);
    Floats power = rest * 1.53533616e-04f + 1.33988744e-03f;
    power = power * rest + 9.61843736e-03f;
    power = power * rest + 5.55033247e-02f;
    power = power * rest + 2.40226479e-01f;
    power = power * rest + 6.93147203e-01f;
    power = power * rest + 1.0f;
    const Ints scaled = reinterpret_cast<Ints>(power) + (reinterpret_cast<Ints>(shifted) << 23);
    return x < -126.0f ? Floats{} : reinterpret_cast<Floats>(scaled) + (x - x);  // not a number where x is none
}
#endif

}  // namespace
