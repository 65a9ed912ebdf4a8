// Partial attention over a paged pool of keys and values on the CPU; attention/cpu_backend.py calls it.
//
// One call serves all rows of a step. The queries of a row that read one KV head, its whole group, are cut into tiles. A
// tile goes over the row's keys, KEYS at a time: they are packed for the caches, the keys transposed, and an
// online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1) adds them to what came before. Strips of a few queries
// keep their sums in registers. Where a row has no more than these, as a decode has, keys are read where they lie. Sums are
// float32 whatever the pool holds. What a query gets does not depend on the number of threads, on the other rows or on where
// its keys lie.

#include "pairs.h"
#include "vectors.h"

namespace {

constexpr int QUERIES = 768, LEAST = 96;  // of a tile: most queries and, for the sake of threads, fewer
constexpr int SUMS = 384 * 128;           // most numbers of its queries: a second-level cache holds them, and their sums
constexpr int FEW_QUERIES = 32, FEW_KEYS = 64;  // so few queries go over so many keys at a time, which a first-level cache holds
constexpr int PART = 2048, MOST_PARTS = 64;     // ... and read parts of a row's keys independently
constexpr int UNPACKED_QUERIES = 8, UNPACKED_KEYS = 32;  // so few go over keys that are not packed
constexpr int LINE = 16;  // floats of a line of the caches
constexpr int64_t WINDOW = (1 << 15) / KEYS * KEYS;  // keys whose sums are kept in one float32: over millions they would lose digits
static_assert(WINDOW % FEW_KEYS == 0 && WINDOW % UNPACKED_KEYS == 0, "a window ends where a tile of keys does");
constexpr float LN_2 = 0.6931471805599453f;

// The keys that begin at keys + from[key], as kt[h * KEYS + key], while memory fetches those at keys + next[key].
template <class T>
void transpose(const T* keys, const int64_t* from, const int64_t* next, int num_keys, int H, float* kt) {
    for (int key = 0; key < num_keys; key += W)
        for (int h = 0; h < H; h += W) {
            Floats x[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) {
                __builtin_prefetch(keys + next[key + i] + h, 0, 2);
                x[i] = wide(keys + from[key + i] + h);
            }
            transpose(x, std::make_integer_sequence<int, W>{});
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store(kt + (h + i) * KEYS + key, x[i]);
        }
}

// c[R, NC * W] = scale[R] * c + a[R, depth] b[depth, NC * W], of which a's strides are given, and b tells where so many of
// a row's numbers are, from the first on; without scale c begins at 0.
template <int R, int NC, class Rows>
inline void product(const float* a, int row, int column, Rows b, int first, int depth, float* c, int c_row, const float* scale) {
    Floats x[R][NC];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NC; n++) x[r][n] = scale ? load(c + r * c_row + n * W) * scale[r] : Floats{};
    for (int i = 0; i < depth; i++) {
        Floats y[NC];
        const auto* at = b(i, first, NC * W);
        for (int n = 0; n < NC; n++) y[n] = wide(at + n * W);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int n = 0; n < NC; n++) x[r][n] += a[r * row + i * column] * y[n];
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NC; n++) store(c + r * c_row + n * W, x[r][n]);
}

// The same for any width that is a multiple of W.
template <int R, class Rows>
inline void product(const float* a, int row, int column, Rows b, int depth, float* c, int c_row, const float* scale, int width) {
    constexpr int NC = R >= 4 ? 2 : R >= 2 || W == 16 ? 4 : 8;  // sums enough to hide their latency
    int at = 0;
    for (; at + NC * W <= width; at += NC * W) product<R, NC>(a, row, column, b, at, depth, c + at, c_row, scale);
    for (; at < width; at += W) product<R, 1>(a, row, column, b, at, depth, c + at, c_row, scale);
}

// R queries, scaled and transposed, over a tile of keys of which each sees the first seen[r].
template <int R>
void attend_strip(const float* q, const Keys& keys, const int* seen, float* out, float* top, float* sum) {
    alignas(64) float scores[R][KEYS], change[(R + W - 1) / W * W] = {};
    const int num = seen[R - 1], width = (num + W - 1) / W * W, H = keys.H;  // the last query sees most
    product<R>(q, 1, R, [&](int h, int first, int) { return keys.kt + h * KEYS + first; }, H, scores[0], KEYS, nullptr, width);
    softmax(R, width, seen, 1.0f, scores, scores, change, top, sum);
    product<R>(scores[0], KEYS, 1, [&](int key, int first, int) { return keys.v + key * H + first; }, num, out, H, change, H);
}

// A tile's keys and values where they lie in the pool, and the next tile's.
template <class T>
struct Unpacked {
    const T *k, *v;
    const int64_t *from, *next;
    int H;

    static void fetch(const T* at, int num) {
        for (int h = 0; h < num; h += 64 / int(sizeof(T))) __builtin_prefetch(at + h);
    }
};

// scores[R, W] of W keys that begin at key: products of rows as they lie, summed up at the end.
template <int R, class T>
__attribute__((noinline)) void score(const float* q, const Unpacked<T>& keys, int key, float* scores) {
    constexpr int Q = R >= 4 ? 4 : R >= 2 ? 2 : 1, N = W / Q;  // queries and keys at a time
    for (int first = 0; first < W; first += N) {
        Floats x[W] = {};
        const T* at[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) at[i] = keys.k + keys.from[key + first + i];
        for (int h = 0; h < keys.H; h += W) {
#pragma GCC unroll 16
            for (int i = 0; i < N; i++) {
                const Floats its = wide(at[i] + h);
#pragma GCC unroll 4
                for (int r = 0; r < Q; r++) x[r * N + i] += its * load(q + r * keys.H + h);
            }
        }
        const Floats sums = sums_of(x, std::make_integer_sequence<int, W>{});
        for (int r = 0; r < Q; r++)
            std::memcpy(scores + r * KEYS + first, reinterpret_cast<const float*>(&sums) + r * N, N * sizeof(float));
    }
    if constexpr (R > Q) score<R - Q>(q + Q * keys.H, keys, key, scores + Q * KEYS);
}

// The same of queries that lie as they came, and of keys in the pool: to pack them would take longer than they do. Values are
// fetched while keys are read, and the next keys while values are.
template <int R, class T>
void attend_strip(const float* q, const Unpacked<T>& keys, const int* seen, float* out, float* top, float* sum) {
    alignas(64) float scores[R][KEYS], change[(R + W - 1) / W * W] = {};
    const int num = seen[R - 1], width = (num + W - 1) / W * W, H = keys.H;
    for (int key = 0; key < width; key += W) {
        for (int i = key; i < key + W; i++) keys.fetch(keys.v + keys.from[i], H);
        score<R>(q, keys, key, scores[0] + key);
    }
    softmax(R, width, seen, 1.0f, scores, scores, change, top, sum);
    int ahead = 0, h = 0;
    auto values = [&](int key, int first, int its) {
        keys.fetch(keys.k + keys.next[ahead] + h, its);
        if ((h += its) >= H) h = 0, ahead++;
        return keys.v + keys.from[key] + first;
    };
    product<R>(scores[0], KEYS, 1, values, num, out, H, change, H);
}

template <int R, class Keys>
void attend_strip(int num, const float* q, const Keys& keys, const int* seen, float* out, float* top, float* sum) {
    if (num == R) return attend_strip<R>(q, keys, seen, out, top, sum);
    if constexpr (R > 1) attend_strip<R - 1>(num, q, keys, seen, out, top, sum);
}

// How a thread computes: by vectors, all in float32. Queries lie scaled and, where they are many, transposed by strips.
struct ByVectors {
    static constexpr int MOST = STRIP;  // queries of a strip
    static constexpr bool PACKS_ALWAYS = false;

    template <class T>
    void put_query(const T* q, int at, int i, int num, bool turns, int H, float scale, float* queries) {
        for (int h = 0; h < H; h++) queries[at * H + (turns ? h * num + i : i * H + h)] = widened(q[h]) * scale;
    }
    template <class T>
    void pack(const T* k, const T* v, const int64_t* from, const int64_t* next, Keys& keys) {
        transpose(k, from, next, keys.num, keys.H, keys.kt);
        for (int key = 0; key < keys.num; key++)
            for (int h = 0; h < keys.H; h += W) {
                __builtin_prefetch(v + next[key] + h, 0, 2);
                store(keys.v + key * keys.H + h, wide(v + from[key] + h));
            }
    }
    void attend(int num, const float* queries, float, const Keys& keys, const int* seen, float* out, float* top, float* sum) {
        attend_strip<STRIP>(num, queries, keys, seen, out, top, sum);
    }
};

// Queries [first, end) of a row and of some KV heads, a token's group beside each other, over its keys [from, to).
struct Task {
    int64_t row, head, heads, first, end, from, to, part, num_parts, partial;
};

template <class Kernel, class T>
void attend(const T* q, const T* k, const T* v, int64_t q_stride, int64_t token_stride, int64_t head_stride, T* out,
            float* lse, int64_t N, int64_t K, int64_t H, int64_t R, const int64_t* q_indptr, const int64_t* kv_len,
            const uint8_t* causal, const int32_t* pages, const int64_t* page_indptr, int64_t page_size, int num_threads) {
    const int64_t G = N / K;
    auto sees = [&](int64_t row, int64_t query) {  // how many keys
        return causal[row] ? kv_len[row] - (q_indptr[row + 1] - q_indptr[row]) + query / G + 1 : kv_len[row];
    };
    auto num_queries = [&](int64_t row) { return (q_indptr[row + 1] - q_indptr[row]) * G; };
    auto part_size = [&](int64_t row) {
        const int64_t size = std::max<int64_t>(kv_len[row], 1);
        if (num_queries(row) > FEW_QUERIES) return size;
        return (std::max<int64_t>(PART, (size + MOST_PARTS - 1) / MOST_PARTS) + KEYS - 1) / KEYS * KEYS;
    };
    auto num_parts = [&](int64_t row) { return std::max<int64_t>((kv_len[row] + part_size(row) - 1) / part_size(row), 1); };
    int64_t few = 0, many = 0;  // tasks if each has all heads, and queries
    for (int64_t row = 0; row < R; row++) {
        if (num_queries(row) > FEW_QUERIES)
            many += num_queries(row) * K;
        else
            few += num_parts(row);
    }
    // Each thread has some tasks. Heads together read memory from end to end, many queries pack keys and values less often.
    constexpr int MOST = Kernel::MOST;
    const int64_t most_queries = std::clamp<int64_t>(SUMS / H / MOST * MOST, LEAST, QUERIES);
    const int64_t together = few < 2 * num_threads ? 1 : most_queries / FEW_QUERIES;
    const bool is_even = (K % num_threads == 0 || num_threads % K == 0) && many <= num_threads * most_queries;
    const int64_t share = many / (is_even ? num_threads : 2 * num_threads);  // of a task; two are put together more evenly
    const int64_t tile = std::clamp<int64_t>((share + MOST - 1) / MOST * MOST, LEAST, most_queries);
    std::vector<Task> tasks;
    int64_t num_partials = 0;
    for (int64_t row = 0; row < R; row++) {
        const int64_t num = num_queries(row), size = part_size(row), parts = num_parts(row);
        const int64_t most_heads = num > FEW_QUERIES ? 1 : together;
        for (int64_t head = 0; head < K; head += most_heads)
            for (int64_t first = 0; first < num; first += tile) {
                const int64_t end = std::min(first + tile, num), most = sees(row, end - 1), heads = std::min(most_heads, K - head);
                for (int64_t part = 0; part < parts; part++)
                    tasks.push_back({row, head, heads, first, end, part * size, std::min((part + 1) * size, most), part, parts,
                                     num_partials + part * heads * num});
                num_partials += parts > 1 ? parts * heads * num : 0;  // num <= FEW_QUERIES: one tile
            }
    }
    auto packs = [&](int64_t row) { return Kernel::PACKS_ALWAYS || num_queries(row) > UNPACKED_QUERIES; };
    auto keys_at_a_time = [&](int64_t row) { return !packs(row) ? UNPACKED_KEYS : num_queries(row) > FEW_QUERIES ? KEYS : FEW_KEYS; };
    auto find = [&](const Task& task, int64_t at, int64_t* from) {  // where keys begin; for those that are not, any place
        int64_t page = page_indptr[task.row] + at / page_size, in = at % page_size, last = 0;
        for (int key = 0, num = keys_at_a_time(task.row); key < num; key++) {
            if (at + key < task.to) last = (pages[page] * page_size + in) * token_stride;
            if (++in == page_size) in = 0, page++;
            from[key] = last;
        }
    };
    auto cost = [](const Task& task) { return (task.end - task.first + 8) * task.heads * (task.to - task.from); };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
    std::vector<float> partials(num_partials * (H + 2));  // out, not divided, the largest score and the sum
    auto place = [&](const Task& task, int64_t i) {  // of a task's query, heads outermost, among [T, N]
        const int64_t num = task.end - task.first, query = task.first + i % num;
        return (q_indptr[task.row] + query / G) * N + (task.head + i / num) * G + query % G;
    };
    auto finish = [&](int64_t to, const float* sums, float top, float sum) {
        lse[to] = sum != 0 ? (top + std::log2(sum)) * LN_2 : -INFINITY;  // of NaN NaN
        for (int64_t h = 0; h < H; h++) narrow(sum != 0 ? sums[h] / sum : 0.0f, out + to * H + h);
    };

#pragma omp parallel num_threads(num_threads)
    {
        thread_local std::vector<float> buffer;
        buffer.resize(std::max<size_t>(buffer.size(), (2 * KEYS + 3 * most_queries) * H + LINE));
        float* packed = buffer.data() + -(uintptr_t(buffer.data()) / sizeof(float)) % LINE;  // no vector lies in two lines
        float *queries = packed + 2 * KEYS * H, *sums = queries + most_queries * H, top[QUERIES], sum[QUERIES];
        float *all_sums = sums + most_queries * H, all_top[QUERIES], all_sum[QUERIES];  // of the windows that are done
        Keys keys{packed, packed + KEYS * H, 0, int(H)};
        int seen[QUERIES];
        int64_t from[KEYS], next[KEYS];  // where the tile's keys begin, and those of the tile behind it
        Kernel kernel;
#pragma omp for schedule(dynamic)
        for (size_t n = 0; n < tasks.size(); n++) {
            const Task& task = tasks[n];
            const int a_head = int(task.end - task.first), num = a_head * int(task.heads);
            const bool is_packed = packs(task.row);
            const int strip = is_packed ? MOST : UNPACKED_QUERIES;
            const float scale = 1 / (LN_2 * std::sqrt(float(H)));
            auto for_strips = [&](int head, auto each) {
                for (int i = 0; i < a_head; i += strip) each(head * a_head + i, i, std::min(strip, a_head - i));
            };
            for (int head = 0; head < task.heads; head++)
                for_strips(head, [&](int at, int, int some) {
                    for (int i = 0; i < some; i++) {
                        const int64_t its = place(task, at + i);
                        kernel.put_query(q + its / N * q_stride + its % N * H, at, i, some, is_packed, int(H), scale, queries);
                    }
                });
            auto clear = [&](float* its_sums, float* its_top, float* its_sum) {
                std::fill(its_sums, its_sums + num * H, 0.0f);
                std::fill(its_top, its_top + num, -INFINITY);
                std::fill(its_sum, its_sum + num, 0.0f);
            };
            auto end_window = [&] {
                for (int i = 0; i < num; i++) {
                    if (top[i] == -INFINITY && sum[i] == 0) continue;
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
            const int some_keys = keys_at_a_time(task.row);
            find(task, task.from, next);
            for (int64_t at = task.from; at < task.to; at += keys.num) {
                if (at > task.from && (at - task.from) % WINDOW == 0) end_window();
                keys.num = int(std::min<int64_t>(some_keys, task.to - at));
                std::copy(next, next + some_keys, from);
                if (at + some_keys < task.to) find(task, at + some_keys, next);
                for (int i = 0; i < a_head; i++)
                    seen[i] = int(std::clamp<int64_t>(sees(task.row, task.first + i) - at, 0, keys.num));
                for (int head = 0; head < task.heads; head++) {
                    const int64_t its = (task.head + head) * head_stride;
                    if (is_packed) kernel.pack(k + its, v + its, from, next, keys);
                    for_strips(head, [&](int to, int i, int some) {
                        const float* its_queries = queries + to * H;
                        float* its_sums = sums + to * H;
                        if (!seen[i + some - 1]) return;
                        if (is_packed)
                            kernel.attend(some, its_queries, scale, keys, seen + i, its_sums, top + to, sum + to);
                        else
                            attend_strip<UNPACKED_QUERIES>(some, its_queries, Unpacked<T>{k + its, v + its, from, next, int(H)},
                                                           seen + i, its_sums, top + to, sum + to);
                    });
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
                    finish(place(task, i), sums + i * H, top[i], sum[i]);
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
            for (int64_t i = 0, num = (task.end - task.first) * task.heads; i < num; i++) {
                const int64_t step = num * (H + 2);
                const float* part = partials.data() + (task.partial + i) * (H + 2);
                float most = -INFINITY, total = 0;
                for (int64_t p = 0; p < task.num_parts; p++) most = std::max(most, part[p * step + H]);
                std::fill(sums, sums + H, 0.0f);
                for (int64_t p = 0; p < task.num_parts; p++) {
                    if (part[p * step + H] == -INFINITY && part[p * step + H + 1] == 0) continue;
                    const float weight = std::exp2(part[p * step + H] - most);
                    total += weight * part[p * step + H + 1];
                    for (int64_t h = 0; h < H; h++) sums[h] += weight * part[p * step + h];
                }
                finish(place(task, i), sums, most, total);
            }
        }
    }
}

// Attention over the union of P parts, R rows of H numbers each, from outputs and natural log-sum-exps of the parts.
template <class T>
void merge(const T* const* outs, const float* const* lses, int64_t P, int64_t R, int64_t H, T* out, float* lse,
           int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (P * R * H > 1 << 14)
    for (int64_t r = 0; r < R; r++) {
        thread_local std::vector<float> sums;
        sums.assign(H, 0.0f);
        float most = lses[0][r], total = 0;
        for (int64_t p = 1; p < P; p++) most = std::max(most, lses[p][r]);
        for (int64_t p = 0; p < P; p++) total += most == -INFINITY ? 0 : std::exp(lses[p][r] - most);
        lse[r] = most + std::log(total);
        for (int64_t p = 0; p < P; p++) {
            const float weight = most == -INFINITY ? 0 : std::exp(lses[p][r] - lse[r]);
            for (int64_t h = 0; h < H; h++) sums[h] += weight * widened(outs[p][r * H + h]);
        }
        for (int64_t h = 0; h < H; h++) narrow(sums[h], out + r * H + h);
    }
}

template <class T>
auto* attend_for(int64_t H) {
#if MEDHA_PAIRS
    if constexpr (std::is_same_v<T, BFloat16>)
        if (H % (2 * W) == 0) return &attend<ByPairs, T>;
#endif
    return &attend<ByVectors, T>;
}

}  // namespace

#define MEDHA_ATTEND(NAME, T)                                                                                            \
    extern "C" void attend_##NAME(const T* q, const T* k, const T* v, int64_t q_stride, int64_t token_stride,            \
                         int64_t head_stride, T* out, float* lse, int64_t N, int64_t K, int64_t H, int64_t R,            \
                         const int64_t* q_indptr, const int64_t* kv_len, const uint8_t* causal, const int32_t* pages,    \
                         const int64_t* page_indptr, int64_t page_size, int num_threads) {                               \
        attend_for<T>(H)(q, k, v, q_stride, token_stride, head_stride, out, lse, N, K, H, R, q_indptr, kv_len, causal,   \
                         pages, page_indptr, page_size, num_threads);                                                    \
    }                                                                                                                    \
    extern "C" void merge_##NAME(const T* const* outs, const float* const* lses, int64_t P, int64_t R, int64_t H,        \
                                 T* out, float* lse, int num_threads) {                                                  \
        merge(outs, lses, P, R, H, out, lse, num_threads);                                                               \
    }
MEDHA_ATTEND(float32, float)
MEDHA_ATTEND(float16, Float16)
MEDHA_ATTEND(bfloat16, BFloat16)
