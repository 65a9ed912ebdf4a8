// Partial attention over a paged pool of keys and values on the CPU; attention/cpu_backend.py calls it.
//
// One call serves all rows of a step. The queries of a row that read one KV head, its whole group, are cut into tiles. A
// tile goes over the row's keys 64 at a time: they are packed for the first-level cache, the keys transposed, and an
// online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1) adds them to what came before. Strips of a few queries
// keep their sums in registers. Sums are float32 whatever the pool holds. What a query gets does not depend on the number of
// threads, on the other rows or on where its keys lie.

#include "vectors.h"

namespace {

constexpr int KEYS = 64, QUERIES = 96;                         // of a tile
constexpr int FEW_QUERIES = 32, PART = 2048, MOST_PARTS = 64;  // so few queries read parts of a row's keys independently
constexpr int64_t WINDOW = 1 << 15;  // keys whose sums are kept in one float32: over millions they would lose digits
constexpr float LN_2 = 0.6931471805599453f;

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// Keys, `stride` apart, as kt[h * KEYS + key].
template <class T>
void transpose(const T* keys, int64_t stride, int num_keys, int H, float* kt) {
    int key = 0;
    for (; key + 4 <= num_keys; key += 4, keys += 4 * stride)
        for (int h = 0; h < H; h += 4) {
            Four x[4];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) x[i][j] = widened(keys[i * stride + h + j]);
            const Four a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
            const Four c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
            float* to = kt + h * KEYS + key;
            *reinterpret_cast<Four*>(to) = __builtin_shufflevector(a, b, 0, 1, 4, 5);
            *reinterpret_cast<Four*>(to + KEYS) = __builtin_shufflevector(a, b, 2, 3, 6, 7);
            *reinterpret_cast<Four*>(to + 2 * KEYS) = __builtin_shufflevector(c, d, 0, 1, 4, 5);
            *reinterpret_cast<Four*>(to + 3 * KEYS) = __builtin_shufflevector(c, d, 2, 3, 6, 7);
        }
    for (; key < num_keys; key++, keys += stride)
        for (int h = 0; h < H; h++) kt[h * KEYS + key] = widened(keys[h]);
}

// c[R, NC * W] = scale[R] * c + a[R, depth] b[depth, NC * W], of which a's strides are given, with the lines of memory
// from `next` on asked for meanwhile; without scale c begins at 0.
template <int R, int NC>
inline void product(const float* a, int row, int column, const float* b, int b_row, int depth, float* c, int c_row,
                    const float* scale, const char*& next) {
    Floats x[R][NC];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NC; n++) x[r][n] = scale ? load(c + r * c_row + n * W) * scale[r] : Floats{};
    for (int i = 0; i < depth; i++) {
        __builtin_prefetch(next + 64 * i, 0, 2);
        Floats y[NC];
        for (int n = 0; n < NC; n++) y[n] = load(b + i * b_row + n * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int n = 0; n < NC; n++) x[r][n] += a[r * row + i * column] * y[n];
    }
    next += 64 * depth;
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NC; n++) store(c + r * c_row + n * W, x[r][n]);
}

// The same for any width that is a multiple of W.
template <int R>
inline void product(const float* a, int row, int column, const float* b, int b_row, int depth, float* c, int c_row,
                    const float* scale, int width, const char* next) {
    constexpr int NC = R >= 4 ? 2 : R >= 2 ? 4 : KEYS / W < 8 ? KEYS / W : 8;  // sums enough to hide their latency
    int at = 0;
    for (; at + NC * W <= width; at += NC * W)
        product<R, NC>(a, row, column, b + at, b_row, depth, c + at, c_row, scale, next);
    for (; at < width; at += W) product<R, 1>(a, row, column, b + at, b_row, depth, c + at, c_row, scale, next);
}

// A tile's keys and values, and where those of the tile behind it are expected.
struct Keys {
    float *kt, *v;
    const char *next_k, *next_v;
    int num, H;
};

// R queries, scaled and transposed, over a tile of keys of which each sees the first seen[r].
template <int R>
void attend_strip(const float* q, const Keys& keys, const int* seen, float* out, float* top, float* sum) {
    alignas(64) float scores[R][KEYS];
    float scale[R];
    const int width = (keys.num + W - 1) / W * W, H = keys.H;
    product<R>(q, 1, R, keys.kt, KEYS, H, scores[0], KEYS, nullptr, width, keys.next_k);
    for (int r = 0; r < R; r++) {
        for (int key = seen[r]; key < width; key++) scores[r][key] = -INFINITY;
        Floats most = load(scores[r]), total = {};
        for (int at = W; at < width; at += W) {
            const Floats x = load(scores[r] + at);
            most = x > most ? x : most;
        }
        float now = top[r];
        for (int i = 0; i < W; i++) now = std::max(now, most[i]);
        const float base = now == -INFINITY ? 0.0f : now;
        for (int at = 0; at < width; at += W) {
            const Floats x = exp2_(load(scores[r] + at) - base);
            store(scores[r] + at, x);
            total += x;
        }
        scale[r] = std::exp2(top[r] - base);
        sum[r] *= scale[r];
        for (int i = 0; i < W; i++) sum[r] += total[i];
        top[r] = now;
    }
    product<R>(scores[0], KEYS, 1, keys.v, H, keys.num, out, H, scale, H, keys.next_v);
}

template <int R>
void attend_strip(int num, const float* q, const Keys& keys, const int* seen, float* out, float* top, float* sum) {
    if (num == R) return attend_strip<R>(q, keys, seen, out, top, sum);
    if constexpr (R > 1) attend_strip<R - 1>(num, q, keys, seen, out, top, sum);
}

// Queries [first, end) of a row and a KV head, a token's group beside each other, over its keys [from, to).
struct Task {
    int64_t row, head, first, end, from, to, part, num_parts, partial;
};

template <class T>
void attend(const T* q, const T* k, const T* v, int64_t token_stride, int64_t head_stride, T* out, float* lse, int64_t N,
            int64_t K, int64_t H, int64_t R, const int64_t* q_indptr, const int64_t* kv_len, const uint8_t* causal,
            const int32_t* pages, const int64_t* page_indptr, int64_t page_size, int num_threads) {
    const int64_t G = N / K;
    auto sees = [&](int64_t row, int64_t query) {  // how many keys
        return causal[row] ? kv_len[row] - (q_indptr[row + 1] - q_indptr[row]) + query / G + 1 : kv_len[row];
    };
    std::vector<Task> tasks;
    int64_t num_partials = 0;
    for (int64_t row = 0; row < R; row++) {
        const int64_t num = (q_indptr[row + 1] - q_indptr[row]) * G;
        int64_t size = std::max<int64_t>(kv_len[row], 1);
        if (num <= FEW_QUERIES) {
            size = std::max<int64_t>(PART, (size + MOST_PARTS - 1) / MOST_PARTS);
            size = (size + KEYS - 1) / KEYS * KEYS;
        }
        const int64_t parts = std::max<int64_t>((kv_len[row] + size - 1) / size, 1);
        for (int64_t head = 0; head < K; head++)
            for (int64_t first = 0; first < num; first += QUERIES) {
                const int64_t end = std::min(first + QUERIES, num), most = sees(row, end - 1);
                for (int64_t part = 0; part < parts; part++)
                    tasks.push_back({row, head, first, end, part * size, std::min((part + 1) * size, most), part, parts,
                                     num_partials + part * num});
                num_partials += parts > 1 ? parts * num : 0;  // num <= FEW_QUERIES: one tile
            }
    }
    auto cost = [](const Task& task) { return (task.end - task.first + 8) * (task.to - task.from); };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    std::vector<float> partials(num_partials * (H + 2));  // out, not divided, the largest score and the sum
    auto place = [&](const Task& task, int64_t query) {  // of a query among [T, N]
        return (q_indptr[task.row] + query / G) * N + task.head * G + query % G;
    };
    auto finish = [&](const Task& task, int64_t query, const float* sums, float top, float sum) {
        const int64_t to = place(task, query);
        lse[to] = sum > 0 ? (top + std::log2(sum)) * LN_2 : -INFINITY;
        for (int64_t h = 0; h < H; h++) narrow(sum > 0 ? sums[h] / sum : 0.0f, out + to * H + h);
    };

#pragma omp parallel num_threads(num_threads)
    {
        std::vector<float> buffer((2 * KEYS + 3 * QUERIES) * H);
        float *queries = buffer.data() + 2 * KEYS * H, *sums = queries + QUERIES * H, top[QUERIES], sum[QUERIES];
        float *all_sums = sums + QUERIES * H, all_top[QUERIES], all_sum[QUERIES];  // of the windows that are done
        Keys keys{buffer.data(), buffer.data() + KEYS * H, nullptr, nullptr, 0, int(H)};
        int seen[QUERIES];
#pragma omp for schedule(dynamic)
        for (size_t n = 0; n < tasks.size(); n++) {
            const Task& task = tasks[n];
            const int num = int(task.end - task.first);
            const float scale = 1 / (LN_2 * std::sqrt(float(H)));
            for (int at = 0; at < num; at += STRIP)
                for (int i = 0, some = std::min(STRIP, num - at); i < some; i++) {
                    const T* from = q + place(task, task.first + at + i) * H;
                    for (int64_t h = 0; h < H; h++) queries[at * H + h * some + i] = widened(from[h]) * scale;
                }
            auto clear = [&](float* its_sums, float* its_top, float* its_sum) {
                std::fill(its_sums, its_sums + num * H, 0.0f);
                std::fill(its_top, its_top + num, -INFINITY);
                std::fill(its_sum, its_sum + num, 0.0f);
            };
            auto end_window = [&] {
                for (int i = 0; i < num; i++) {
                    if (top[i] == -INFINITY) continue;
                    const float most = std::max(all_top[i], top[i]);
                    const float before = std::exp2(all_top[i] - most), now = std::exp2(top[i] - most);
                    for (int64_t h = i * H; h < (i + 1) * H; h++) all_sums[h] = all_sums[h] * before + sums[h] * now;
                    all_sum[i] = all_sum[i] * before + sum[i] * now;
                    all_top[i] = most;
                }
                clear(sums, top, sum);
            };
            clear(sums, top, sum);
            clear(all_sums, all_top, all_sum);
            for (int64_t at = task.from; at < task.to; at += keys.num) {
                if (at > task.from && (at - task.from) % WINDOW == 0) end_window();
                keys.num = int(std::min<int64_t>(KEYS, task.to - at));
                if (keys.num % W) std::fill(keys.kt, keys.kt + KEYS * H, 0.0f);  // behind them are no scores
                for (int done = 0; done < keys.num;) {
                    const int64_t page = pages[page_indptr[task.row] + (at + done) / page_size], in = (at + done) % page_size;
                    const int some = int(std::min<int64_t>(keys.num - done, page_size - in));
                    const int64_t from = (page * page_size + in) * token_stride + task.head * head_stride;
                    transpose(k + from, token_stride, some, int(H), keys.kt + done);
                    for (int key = 0; key < some; key++)
                        for (int64_t h = 0; h < H; h++) keys.v[(done + key) * H + h] = widened(v[from + key * token_stride + h]);
                    keys.next_k = reinterpret_cast<const char*>(k + from + some * token_stride);
                    keys.next_v = reinterpret_cast<const char*>(v + from + some * token_stride);
                    done += some;
                }
                for (int i = 0; i < num; i++)
                    seen[i] = int(std::clamp<int64_t>(sees(task.row, task.first + i) - at, 0, keys.num));
                for (int i = 0; i < num; i += STRIP) {
                    const int some = std::min(STRIP, num - i);
                    if (seen[i + some - 1])
                        attend_strip<STRIP>(some, queries + i * H, keys, seen + i, sums + i * H, top + i, sum + i);
                    keys.next_k = keys.next_v = reinterpret_cast<const char*>(keys.kt);  // they are on their way
                }
            }
            if (task.to - task.from > WINDOW) {
                end_window();
                std::copy(all_sums, all_sums + num * H, sums);
                std::copy(all_top, all_top + num, top);
                std::copy(all_sum, all_sum + num, sum);
            }
            for (int i = 0; i < num; i++) {
                if (task.num_parts == 1) {
                    finish(task, task.first + i, sums + i * H, top[i], sum[i]);
                    continue;
                }
                float* to = partials.data() + (task.partial + i) * (H + 2);
                std::copy(sums + i * H, sums + (i + 1) * H, to);
                to[H] = top[i], to[H + 1] = sum[i];
            }
        }
#pragma omp for schedule(dynamic)
        for (size_t n = 0; n < tasks.size(); n++) {  // parts are put together in their order
            const Task& task = tasks[n];
            if (task.num_parts == 1 || task.part) continue;
            for (int64_t query = task.first; query < task.end; query++) {
                const int64_t step = (task.end - task.first) * (H + 2);
                const float* part = partials.data() + (task.partial + query) * (H + 2);
                float most = -INFINITY, total = 0;
                for (int64_t p = 0; p < task.num_parts; p++) most = std::max(most, part[p * step + H]);
                std::fill(sums, sums + H, 0.0f);
                for (int64_t p = 0; p < task.num_parts; p++) {
                    if (part[p * step + H] == -INFINITY) continue;
                    const float weight = std::exp2(part[p * step + H] - most);
                    total += weight * part[p * step + H + 1];
                    for (int64_t h = 0; h < H; h++) sums[h] += weight * part[p * step + h];
                }
                finish(task, query, sums, most, total);
            }
        }
    }
}

}  // namespace

#define MEDHA_ATTEND(NAME, T)                                                                                            \
    extern "C" void NAME(const T* q, const T* k, const T* v, int64_t token_stride, int64_t head_stride, T* out,          \
                         float* lse, int64_t N, int64_t K, int64_t H, int64_t R, const int64_t* q_indptr,                \
                         const int64_t* kv_len, const uint8_t* causal, const int32_t* pages, const int64_t* page_indptr, \
                         int64_t page_size, int num_threads) {                                                           \
        attend(q, k, v, token_stride, head_stride, out, lse, N, K, H, R, q_indptr, kv_len, causal, pages, page_indptr,   \
               page_size, num_threads);                                                                                  \
    }
MEDHA_ATTEND(attend_float32, float)
MEDHA_ATTEND(attend_float16, Float16)
MEDHA_ATTEND(attend_bfloat16, BFloat16)
