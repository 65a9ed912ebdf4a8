// Attention and products in bfloat16 where the CPU multiplies pairs of it, by tiles (AMX) or by vectors, for attention.cpp and
// decoder.cpp. Sums are float32, the weights of values bfloat16.

#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

constexpr int KEYS = MEDHA_TILES ? 64 : 192;  // of a tile of keys

// A tile's keys, transposed, and values.
struct Keys {
    float *kt, *v;
    int num, H;
};

// A step of the online softmax: from scores, times scale, of num queries over `width` keys, of which each sees the first seen[r],
// the weights of the keys, and what the sums so far are to be multiplied by. The weights may take the place of the scores.
template <int R, int PADDED, class T>
inline void softmax(int num, int width, const int* seen, float scale, float (&scores)[R][KEYS], T (&weights)[R][KEYS],
                    float (&change)[PADDED], float* top, float* sum) {
    float base[R];
    for (int r = 0; r < num; r++) {
        for (int key = seen[r]; key < width; key++) scores[r][key] = -INFINITY;
        Floats most = load(scores[r]);
        for (int at = W; at < width; at += W) most = larger(most, load(scores[r] + at));
        const float now = std::max(top[r], largest(most) * scale);
        base[r] = now == -INFINITY ? 0.0f : now;
        change[r] = top[r] - base[r];
        top[r] = now;
    }
    for (int r = 0; r < num; r += W) store(change + r, exp2_(load(change + r)));
    for (int r = 0; r < num; r++) {
        Floats total = {};
        for (int at = 0; at < width; at += W) {
            const Floats x = exp2_(load(scores[r] + at) * scale - base[r]);
            narrow(x, weights[r] + at);
            total += x;
        }
        sum[r] = sum[r] * change[r] + sum_of(total);
    }
}

#if MEDHA_PAIRS

inline void narrow(Floats x, BFloat16* to) {
    const __m256bh narrowed = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
    std::memcpy(to, &narrowed, sizeof narrowed);
}

// c[R, NC * W] += a[R, 2 * depth] b[depth, NC * W, 2], of which the strides of rows are given; each(i) is called as it goes.
template <int R, int NC, class Each>
inline void product(const BFloat16* a, int64_t row, const float* b, int64_t b_row, int depth, float* c, int64_t c_row, Each each) {
    __m512 x[R][NC];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NC; n++) x[r][n] = reinterpret_cast<__m512>(load(c + r * c_row + n * W));
    for (int i = 0; i < depth; i++) {
        each(i);
        __m512bh y[NC];
        for (int n = 0; n < NC; n++) y[n] = reinterpret_cast<__m512bh>(load(b + i * b_row + n * W));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t both;
            std::memcpy(&both, a + r * row + 2 * i, sizeof both);
            const auto pair = reinterpret_cast<__m512bh>(_mm512_set1_epi32(both));
#pragma GCC unroll 16
            for (int n = 0; n < NC; n++) x[r][n] = _mm512_dpbf16_ps(x[r][n], pair, y[n]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NC; n++) store(c + r * c_row + n * W, reinterpret_cast<Floats>(x[r][n]));
}

#if MEDHA_TILES

inline void order_memory() { asm volatile("" ::: "memory"); }  // compilers do not know what tile registers read

// The tile registers of a thread, all 64 bytes wide; in the end their shapes are what they were.
class Registers {
    struct alignas(64) Shapes {
        uint8_t palette, row, reserved[14];
        uint16_t bytes_a_row[16];
        uint8_t rows[16];
    } before, now = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {}};

   public:
    Registers() { _tile_storeconfig(&before); }
    ~Registers() {
        order_memory();
        _tile_loadconfig(&before);
    }
    void set_rows(const uint8_t (&rows)[8]) {
        if (std::equal(rows, rows + 8, now.rows)) return;
        std::copy(rows, rows + 8, now.rows);
        order_memory();
        _tile_loadconfig(&now);
    }
};

// The products of attention, of a strip of at most MOST queries: by tiles.
class Products {
    Registers registers;  // 0 to 3 for sums, 4 for the left side of products, 5 and 6 for the right

   public:
    static constexpr int MOST = W;

    // Of num queries [H], with keys of which the first `width` are seen.
    void score(int num, const BFloat16* queries, const Keys& keys, int, float* scores) {
        const uint8_t n = uint8_t(num);
        registers.set_rows({n, n, n, n, n, W, W, W});
        order_memory();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int h = 0; h < keys.H; h += 2 * W) {
            const float* right = keys.kt + h / 2 * KEYS;
            _tile_loadd(4, queries + h, keys.H * 2);
            _tile_loadd(5, right, KEYS * 4);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, right + W, KEYS * 4);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, right + 2 * W, KEYS * 4);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, right + 3 * W, KEYS * 4);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, scores, KEYS * 4);
        _tile_stored(1, scores + W, KEYS * 4);
        _tile_stored(2, scores + 2 * W, KEYS * 4);
        _tile_stored(3, scores + 3 * W, KEYS * 4);
        order_memory();
    }
    // Adds values, weighed, to out.
    void sum(int, const BFloat16* weights, const Keys& keys, int width, float* out) {
        const int H = keys.H;
        order_memory();
        for (int h = 0; h < H; h += 2 * W) {
            _tile_loadd(0, out + h, H * 4);
            _tile_loadd(1, out + h + W, H * 4);
            for (int key = 0; key < width; key += 2 * W) {
                const float* right = keys.v + key / 2 * H + h;
                _tile_loadd(4, weights + key, KEYS * 2);
                _tile_loadd(5, right, H * 4);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(6, right + W, H * 4);
                _tile_dpbf16ps(1, 4, 6);
            }
            _tile_stored(0, out + h, H * 4);
            _tile_stored(1, out + h + W, H * 4);
        }
        order_memory();
    }
};

#else

// The products of attention, of a strip of at most MOST queries: by vectors.
class Products {
    template <int R>
    static void multiply(int num, const BFloat16* a, int row, const float* b, int width, int depth, float* c, int c_row) {
        if (num < R) {
            if constexpr (R > 1) multiply<R - 1>(num, a, row, b, width, depth, c, c_row);
            return;
        }
        constexpr int NC = R >= 4 ? 2 : 4;  // sums enough to hide their latency
        int at = 0;
        for (; at + NC * W <= width; at += NC * W)
            product<R, NC>(a, row, b + at, c_row, depth, c + at, c_row, [](int) {});
        for (; at < width; at += W) product<R, 1>(a, row, b + at, c_row, depth, c + at, c_row, [](int) {});
    }

   public:
    static constexpr int MOST = STRIP;

    void score(int num, const BFloat16* queries, const Keys& keys, int width, float* scores) {
        std::fill(scores, scores + num * KEYS, 0.0f);
        multiply<MOST>(num, queries, keys.H, keys.kt, width, keys.H / 2, scores, KEYS);
    }
    void sum(int num, const BFloat16* weights, const Keys& keys, int width, float* out) {
        multiply<MOST>(num, weights, KEYS, keys.v, keys.H, width / 2, out, keys.H);
    }
};

#endif

// How a thread computes in bfloat16: keys and values lie by pairs, queries as they come.
class ByPairs {
    Products products;

   public:
    static constexpr int MOST = Products::MOST;  // queries of a strip
    static constexpr bool PACKS_ALWAYS = true;

    void put_query(const BFloat16* q, int at, int i, int, bool, int H, float, float* queries) {
        std::copy(q, q + H, reinterpret_cast<BFloat16*>(queries + at * H) + i * H);
    }

    // Keys as kt[h / 2][key][h % 2], values as v[key / 2][h][key % 2], while memory fetches those behind them.
    void pack(const BFloat16* k, const BFloat16* v, const int64_t* from, const int64_t* next, Keys& keys) {
        typedef uint16_t Halves __attribute__((vector_size(2 * W), aligned(2), may_alias));
        auto bits = [](const BFloat16* at) { return __builtin_convertvector(*reinterpret_cast<const Halves*>(at), Ints); };
        for (int key = 0; key < keys.num; key += W)
            for (int h = 0; h < keys.H; h += 2 * W) {
                Floats x[W];
                for (int i = 0; i < W; i++) {
                    __builtin_prefetch(k + next[key + i] + h, 0, 2);
                    x[i] = load(reinterpret_cast<const float*>(k + from[key + i] + h));
                }
                transpose(x, std::make_integer_sequence<int, W>{});
                for (int i = 0; i < W; i++) store(keys.kt + (h / 2 + i) * KEYS + key, x[i]);
            }
        for (int key = 0; key < (keys.num + 2 * W - 1) / (2 * W) * 2 * W; key += 2)  // a product's: 0 times what lies there
            for (int h = 0; h < keys.H; h += W) {
                __builtin_prefetch(v + next[key] + h, 0, 2);
                __builtin_prefetch(v + next[key + 1] + h, 0, 2);
                const Ints pair = bits(v + from[key] + h) | bits(v + from[key + 1] + h) << 16;
                store(keys.v + key / 2 * keys.H + h, reinterpret_cast<Floats>(pair));
            }
    }

    // Of num queries, each over the first seen[r] keys.
    void attend(int num, const float* queries, float scale, const Keys& keys, const int* seen, float* out, float* top,
                float* sum) {
        const int H = keys.H, width = (seen[num - 1] + 2 * W - 1) / (2 * W) * 2 * W;  // the last query sees most
        alignas(64) float scores[MOST][KEYS], change[(MOST + W - 1) / W * W] = {};
        alignas(64) BFloat16 weights[MOST][KEYS];
        products.score(num, reinterpret_cast<const BFloat16*>(queries), keys, width, scores[0]);
        softmax(num, width, seen, scale, scores, weights, change, top, sum);
        for (int r = 0; r < num; r++)
            if (change[r] != 1.0f)
                for (int h = 0; h < H; h += W) store(out + r * H + h, load(out + r * H + h) * change[r]);
        products.sum(num, weights[0], keys, width, out);
    }
};

#endif

}  // namespace
