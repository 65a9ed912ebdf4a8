// What lies around attention in a decoder's layer, on the CPU: products with weights, norms, RoPE; decoder.py calls it.
//
// A product goes over a weight in columns of BLOCK outputs, at most DEPTH inputs at a time, which stay in the first-level
// cache while all rows of x read them; strips of a few rows keep their sums in registers, and each asks for a part of what
// comes next.
// So few rows read a weight as fast as memory gives it. Numbers of 16 bits are widened a tile at a time; sums are float32.
// What a row gets depends neither on the other rows nor on the number of threads.

#include "pairs.h"
#include "vectors.h"

namespace {

constexpr int BLOCK = 2 * W, DEPTH = 192, ROWS = 96;
constexpr int64_t PAGE = 4096, APART = 320;  // bytes that share places of the first-level cache, and that keep rows apart in it
constexpr int64_t SMALL = 1 << 14;  // numbers that one thread is done with sooner than another has woken up
constexpr float LOG2_E = 1.44269504f;

// c[R, BLOCK] += a[R, depth] b[depth, BLOCK]; a's rows are `row` apart. Bytes from `next` on are asked for, `line` a step.
// Inlined, some callers would leave it fewer registers than it needs.
template <int R>
__attribute__((noinline)) void product(const float* a, int64_t row, const float* b, int depth, float* c, const char* next,
                                       int line) {
    Floats x[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        x[r][0] = load(c + r * BLOCK);
        x[r][1] = load(c + r * BLOCK + W);
    }
    for (int i = 0; i < depth; i++) {
        __builtin_prefetch(next + line * i, 0, 2);
        const Floats first = load(b + i * BLOCK), second = load(b + i * BLOCK + W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            x[r][0] += a[r * row + i] * first;
            x[r][1] += a[r * row + i] * second;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        store(c + r * BLOCK, x[r][0]);
        store(c + r * BLOCK + W, x[r][1]);
    }
}

#if MEDHA_PAIRS

// The same in bfloat16, two inputs at once; b lies as [depth / 2, BLOCK, 2].
template <int R>
void product(const BFloat16* a, int64_t row, const BFloat16* b, int depth, float* c, const char* next, int line) {
    product<R, 2>(a, row, reinterpret_cast<const float*>(b), BLOCK, depth / 2, c, BLOCK, [=](int i) {
        __builtin_prefetch(next + 2 * line * i, 0, 2);
        __builtin_prefetch(next + 2 * line * i + line, 0, 2);
    });
}

#endif

template <int R, class Operand>
void product(int num, const Operand* a, int64_t row, const Operand* b, int depth, float* c, const char* next, int line) {
    if (num == R) return product<R>(a, row, b, depth, c, next, line);
    if constexpr (R > 1) product<R - 1>(num, a, row, b, depth, c, next, line);
}

inline Floats silu(Floats x) {
    const Floats power = x * -LOG2_E, most = Floats{} + 126.0f;
    return x / (1.0f + exp2_(power > most ? most : power));
}

template <class T>
inline void as_operand(T x, float* to) { *to = widened(x); }
inline void as_operand(BFloat16 x, BFloat16* to) { *to = x; }

// out[M, N] = x[M, K] w^T + bias. w lies as [N / BLOCK, K, BLOCK]; of gated products as [N / BLOCK, 2, K, BLOCK], the gate
// and what it gates, of which silu(gate) * gated is the output. Operands of another type than T are widened.
template <class Operand, class T>
void linear(const T* x, const T* w, const T* bias, T* out, int64_t M, int64_t K, int64_t N, bool gated, int num_threads) {
    constexpr bool as_is = std::is_same_v<T, Operand>;
    const int64_t blocks = (N + BLOCK - 1) / BLOCK, parts = 1 + gated, slices = (K + DEPTH - 1) / DEPTH;
    const int64_t slice = ((K + slices - 1) / slices + W - 1) / W * W;  // inputs, at most DEPTH
#pragma omp parallel num_threads(num_threads)
    {
        // Rows that begin at the same place of pages would push each other out of the first-level cache: those are copied.
        const bool in_place = as_is && K * sizeof(T) % PAGE;
        const int64_t row = in_place ? K : K + APART / sizeof(Operand);
        std::vector<Operand> copy(in_place ? 0 : std::min<int64_t>(M, ROWS) * row);
        alignas(64) float sums[2][ROWS * BLOCK];
        alignas(64) Operand widened_tile[as_is ? 1 : DEPTH * BLOCK];
        for (int64_t first = 0; first < M; first += ROWS) {
            const int rows = int(std::min<int64_t>(ROWS, M - first)), strips = (rows + STRIP - 1) / STRIP;
            const Operand* a = in_place ? reinterpret_cast<const Operand*>(x + first * K) : copy.data();
            for (int m = 0; !in_place && m < rows; m++)
                for (int64_t i = 0; i < K; i++) as_operand(x[(first + m) * K + i], &copy[m * row + i]);
#pragma omp for schedule(guided) nowait  // what is asked for ahead is mostly the same thread's
            for (int64_t block = 0; block < blocks; block++) {
                const int num = int(std::min<int64_t>(BLOCK, N - block * BLOCK));
                T* to = out + first * N + block * BLOCK;
                for (int64_t part = 0; part < parts; part++) {
                    float* c = sums[part];
                    std::fill(c, c + BLOCK, 0.0f);
                    for (int n = 0; bias && n < num; n++) c[n] = widened(bias[block * BLOCK + n]);
                    for (int m = 1; m < rows; m++) std::copy(c, c + BLOCK, c + m * BLOCK);
                    for (int64_t k = 0; k < K; k += slice) {
                        const int depth = int(std::min(slice, K - k)), line = int(BLOCK * sizeof(T)) / strips;
                        const T* tile = w + ((block * parts + part) * K + k) * BLOCK;
                        const char* next = reinterpret_cast<const char*>(tile + depth * BLOCK);
                        const Operand* b = reinterpret_cast<const Operand*>(tile);
                        if constexpr (!as_is) {
                            for (int i = 0; i < depth * BLOCK; i++) widened_tile[i] = widened(tile[i]);
                            b = widened_tile;
                        }
                        for (int m = 0; m < rows; m += STRIP) {
                            const int some = std::min(STRIP, rows - m);
                            for (int r = m; k == 0 && part == 0 && r < m + some; r++)  // which outputs will be written
                                for (int n = 0; n < BLOCK; n += 64 / sizeof(T)) __builtin_prefetch(to + r * N + n, 1);
                            const char* its_next = next + m / STRIP * line * depth;
                            product<STRIP>(some, a + m * row + k, row, b, depth, c + m * BLOCK, its_next, line);
                        }
                    }
                }
                for (int m = 0; m < rows; m++, to += N) {
                    float* c = sums[0] + m * BLOCK;
                    for (int n = 0; n < BLOCK; n += W) {
                        Floats y = load(c + n);
                        if (gated) y = silu(y) * load(sums[1] + m * BLOCK + n);
                        num == BLOCK ? narrow(y, to + n) : store(c + n, y);
                    }
                    for (int n = 0; num < BLOCK && n < num; n++) narrow(c[n], to + n);
                }
            }
        }
    }
}

#if MEDHA_TILES

constexpr int PAIR = 2 * W, GROUP = 256, SLICE = 256;  // rows that read a slice of a weight one after the other, its inputs
constexpr int WIDE = 3072;  // inputs of which so many rows leave the second-level cache no room

// The same by tiles, for K that is a multiple of PAIR. w lies as [N / BLOCK, K / 2, BLOCK, 2], of gated products likewise.
void linear_by_tiles(const BFloat16* x, const BFloat16* w, const BFloat16* bias, BFloat16* out, int64_t M, int64_t K, int64_t N,
                     bool gated, int num_threads) {
    const int64_t blocks = (N + BLOCK - 1) / BLOCK, parts = 1 + gated;
    const int64_t most = K > WIDE ? GROUP / 2 : GROUP, slice = M > PAIR ? SLICE : K;
#pragma omp parallel num_threads(num_threads)
    {
        alignas(64) float sums[2][GROUP * BLOCK], its_bias[BLOCK] = {};
        Registers registers;  // 0 to 3 for sums, 4 and 5 for rows, 6 and 7 for the weight
#pragma omp for collapse(2) schedule(guided)
        for (int64_t group = 0; group < M; group += most)
            for (int64_t block = 0; block < blocks; block++) {
                const int num = int(std::min<int64_t>(BLOCK, N - block * BLOCK)), all = int(std::min(most, M - group));
                const int strips = (all + PAIR - 1) / PAIR, lines = (PAIR + strips - 1) / strips;  // asked for in a step
                BFloat16* to = out + group * N + block * BLOCK;
                for (int n = 0; bias && n < num; n++) its_bias[n] = widened(bias[block * BLOCK + n]);
                for (int64_t part = 0; part < parts; part++)
                    for (int64_t at = 0; at < K; at += slice) {
                        const int64_t depth = std::min(slice, K - at);
                        const BFloat16* its_tile = w + ((block * parts + part) * K + at) * BLOCK;
                        const char* next = reinterpret_cast<const char*>(its_tile + depth * BLOCK);
                        for (int first = 0; first < all; first += PAIR) {
                            const int rows = std::min(PAIR, all - first), behind = rows > W ? W : 0;
                            const uint8_t upper = uint8_t(std::min(rows, W)), lower = uint8_t(behind ? rows - W : W);
                            const BFloat16 *a = x + (group + first) * K + at, *tile = its_tile;
                            float* c = sums[part] + first * BLOCK;
                            for (int m = 0; at == 0 && part == 0 && m < rows; m++) __builtin_prefetch(to + (first + m) * N, 1);
                            registers.set_rows({upper, upper, lower, lower, upper, lower, W, W});
                            order_memory();
                            if (at == 0) {
                                _tile_zero(0);
                                _tile_zero(1);
                                _tile_zero(2);
                                _tile_zero(3);
                            } else {
                                _tile_loadd(0, c, 4 * BLOCK);
                                _tile_loadd(1, c + W, 4 * BLOCK);
                                _tile_loadd(2, c + behind * BLOCK, 4 * BLOCK);
                                _tile_loadd(3, c + behind * BLOCK + W, 4 * BLOCK);
                            }
                            for (int64_t k = 0; k < depth; k += PAIR, a += PAIR, tile += PAIR * BLOCK) {
                                for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
                                _tile_loadd(4, a, 2 * K);
                                _tile_loadd(6, tile, 4 * BLOCK);
                                _tile_dpbf16ps(0, 4, 6);
                                _tile_loadd(7, tile + 2 * W, 4 * BLOCK);
                                _tile_dpbf16ps(1, 4, 7);
                                if (!behind) continue;
                                _tile_loadd(5, a + W * K, 2 * K);
                                _tile_dpbf16ps(2, 5, 6);
                                _tile_dpbf16ps(3, 5, 7);
                            }
                            _tile_stored(0, c, 4 * BLOCK);
                            _tile_stored(1, c + W, 4 * BLOCK);
                            if (!behind) continue;
                            _tile_stored(2, c + W * BLOCK, 4 * BLOCK);
                            _tile_stored(3, c + W * BLOCK + W, 4 * BLOCK);
                        }
                    }
                order_memory();
                for (int m = 0; m < all; m++, to += N)
                    for (int n = 0; n < num; n += W) {
                        Floats y = load(sums[0] + m * BLOCK + n) + load(its_bias + n);
                        if (gated) y = silu(y) * load(sums[1] + m * BLOCK + n);
                        if (num - n >= W) {
                            narrow(y, to + n);
                            continue;
                        }
                        for (int i = 0; i < num - n; i++) narrow(y[i], to + n + i);
                    }
            }
    }
}

#endif

// out = the norm of x, or of x + residual, which is put in residual. out may be x.
template <class T>
void rmsnorm(const T* x, T* residual, const T* weight, T* out, int64_t M, int64_t D, float eps, int num_threads) {
#pragma omp parallel num_threads(num_threads) if (M * D > SMALL)
    {
        std::vector<float> row(D);
#pragma omp for
        for (int64_t m = 0; m < M; m++) {
            const int64_t at = m * D;
            for (int64_t i = 0; i < D; i++) row[i] = widened(x[at + i]);
            for (int64_t i = 0; residual && i < D; i++) {
                narrow(row[i] + widened(residual[at + i]), residual + at + i);
                row[i] = widened(residual[at + i]);
            }
            Floats squares = {};
            int64_t i = 0;
            for (; i + W <= D; i += W) squares += load(&row[i]) * load(&row[i]);
            float sum = 0;
            for (; i < D; i++) sum += row[i] * row[i];
            for (int n = 0; n < W; n++) sum += squares[n];
            const float scale = 1 / std::sqrt(sum / float(D) + eps);
            for (i = 0; i < D; i++) {
                T rounded;
                narrow(row[i] * scale, &rounded);
                narrow(widened(rounded) * widened(weight[i]), out + at + i);
            }
        }
    }
}

// Turns the pairs (i, i + H / 2) of the heads of x, whose tokens are `stride` apart, in place; cos_sin is [T, 2, H / 2].
template <class T>
void rotate(T* x, const float* cos_sin, int64_t tokens, int64_t heads, int64_t H, int64_t stride, int num_threads) {
    const int64_t half = H / 2;
#pragma omp parallel for num_threads(num_threads) if (tokens * heads * H > SMALL)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t head = 0; head < heads; head++) {
            T *first = x + t * stride + head * H, *second = first + half;
            const float *cosine = cos_sin + t * H, *sine = cosine + half;
            for (int64_t i = 0; i < half; i++) {
                const float a = widened(first[i]), b = widened(second[i]);
                narrow(a * cosine[i] - b * sine[i], first + i);
                narrow(b * cosine[i] + a * sine[i], second + i);
            }
        }
}

}  // namespace

extern "C" int64_t block_of_outputs() { return BLOCK; }

// How many inputs lie together for each output in a weight of bfloat16.
extern "C" int64_t inputs_together(int64_t K) { return MEDHA_PAIRS && K % 2 == 0 ? 2 : 1; }

// Heads of `bytes` bytes from token kept[i] of x, or i, to token targets[i] of a pool; strides are in bytes.
extern "C" void write_tokens(char* pool, const char* x, const int64_t* targets, const int64_t* kept, int64_t token_stride,
                             int64_t head_stride, int64_t x_stride, int64_t num, int64_t heads, int64_t bytes,
                             int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num * heads * bytes > SMALL * 4)
    for (int64_t i = 0; i < num; i++)
        for (int64_t head = 0; head < heads; head++)
            std::memcpy(pool + targets[i] * token_stride + head * head_stride,
                        x + (kept ? kept[i] : i) * x_stride + head * bytes, bytes);
}

namespace {

template <class T>
void best_linear(const T* x, const T* w, const T* bias, T* out, int64_t M, int64_t K, int64_t N, bool gated, int num_threads) {
#if MEDHA_PAIRS
    if constexpr (std::is_same_v<T, BFloat16>) {
#if MEDHA_TILES
        if (K % PAIR == 0) return linear_by_tiles(x, w, bias, out, M, K, N, gated, num_threads);
#endif
        if (K % 2 == 0) return linear<BFloat16>(x, w, bias, out, M, K, N, gated, num_threads);
    }
#endif
    linear<float>(x, w, bias, out, M, K, N, gated, num_threads);
}

}  // namespace

#define MEDHA_DECODER(NAME, T)                                                                                           \
    extern "C" void linear_##NAME(const T* x, const T* w, const T* bias, T* out, int64_t M, int64_t K, int64_t N,        \
                                  int64_t gated, int64_t num_threads) {                                                  \
        best_linear(x, w, bias, out, M, K, N, gated, int(num_threads));                                                  \
    }                                                                                                                    \
    extern "C" void rmsnorm_##NAME(const T* x, T* residual, const T* weight, T* out, int64_t M, int64_t D,               \
                                   int64_t num_threads, double eps) {                                                    \
        rmsnorm(x, residual, weight, out, M, D, float(eps), int(num_threads));                                           \
    }                                                                                                                    \
    extern "C" void rotate_##NAME(T* x, const float* cos_sin, int64_t tokens, int64_t heads, int64_t H, int64_t stride,  \
                                  int64_t num_threads) {                                                                 \
        rotate(x, cos_sin, tokens, heads, H, stride, int(num_threads));                                                  \
    }
MEDHA_DECODER(float32, float)
MEDHA_DECODER(float16, Float16)
MEDHA_DECODER(bfloat16, BFloat16)
