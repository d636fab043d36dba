/* Float32 kernels of the decoder on the CPU: rows times matrix, and root-mean-square norm.
 *
 * The matrix W [in, out] is stored as panels of 64 columns: [out / 64][in][64]. A panel is read as
 * one sequential stream, which is what it takes to reach the memory's rate on one row, and it stays
 * in the L2 cache while the other rows use it, which is what it takes to reach the FMA units' rate
 * on many. BLAS does the second but not the first.
 *
 * Every output element is summed in the same order, whatever the number of rows and threads: a
 * row's result does not depend on what else is in the batch. Sums are built from parts of 64
 * products, since one long chain of float32 additions loses a digit on inner dimensions of 2000.
 */
#include <math.h>
#include <stddef.h>

#define PANEL 64
#define LANES 16
#define DEPTH 64         /* products summed in a register before they join the total */
#define GROUP 6          /* rows per register tile */
#define ROWS_PER_ITEM 96 /* rows per unit of work, a multiple of GROUP */
#define SERIAL_FLOATS 32768 /* below this a norm is not worth waking threads for */

/* A tile of 6 rows x 64 columns takes 24 of AVX-512's 32 registers; elsewhere 6 x 16 must do.
 * One row alone reads several panels side by side: one stream does not fill the memory's queues. */
#if defined(__AVX512F__)
#define VECTORS 4
#define SIDE_BY_SIDE 4
#else
#define VECTORS 1
#define SIDE_BY_SIDE 1
#endif

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

struct product {
    const float *x;
    ptrdiff_t x_stride;
    const float *w;
    ptrdiff_t in;
    float *y;
    ptrdiff_t y_stride;
    int accumulate;
};

static inline __attribute__((always_inline)) lanes
load(const float *from)
{
    return *(const lanes *)from;
}

static inline __attribute__((always_inline)) void
store(float *to, lanes value, int accumulate)
{
    *(lanes *)to = accumulate ? load(to) + value : value;
}

/* `rows` rows times `vectors` * 16 columns, from column `c` of `panels` neighbouring panels. */
static inline __attribute__((always_inline)) void
tile(struct product m, int rows, int panels, int vectors, ptrdiff_t c)
{
    lanes total[GROUP][SIDE_BY_SIDE * 4];
    int width = panels * vectors;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < width; v++)
            total[r][v] = (lanes){0};
    for (ptrdiff_t first = 0; first < m.in; first += DEPTH) {
        ptrdiff_t last = first + DEPTH < m.in ? first + DEPTH : m.in;
        lanes sum[GROUP][SIDE_BY_SIDE * 4];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < width; v++)
                sum[r][v] = (lanes){0};
#pragma GCC unroll 4
        for (ptrdiff_t k = first; k < last; k++) {
            lanes column[SIDE_BY_SIDE * 4];
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < vectors; v++)
                    column[p * vectors + v] = load(m.w + (p * m.in + k) * PANEL + c + v * LANES);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < width; v++)
                    sum[r][v] += column[v] * m.x[r * m.x_stride + k];
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < width; v++)
                total[r][v] += sum[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < vectors; v++)
                store(m.y + r * m.y_stride + p * PANEL + c + v * LANES,
                      total[r][p * vectors + v], m.accumulate);
}

static void
one_row(struct product m, int panels)
{
    switch (panels) {
    case 1: tile(m, 1, 1, 4, 0); break;
#if SIDE_BY_SIDE > 1
    case 2: tile(m, 1, 2, 4, 0); break;
    case 3: tile(m, 1, 3, 4, 0); break;
    case 4: tile(m, 1, 4, 4, 0); break;
#endif
    }
}

static void
several_rows(struct product m, int rows)
{
    for (ptrdiff_t c = 0; c < PANEL; c += VECTORS * LANES)
        switch (rows) {
        case 1: tile(m, 1, 1, VECTORS, c); break;
        case 2: tile(m, 2, 1, VECTORS, c); break;
        case 3: tile(m, 3, 1, VECTORS, c); break;
        case 4: tile(m, 4, 1, VECTORS, c); break;
        case 5: tile(m, 5, 1, VECTORS, c); break;
        case 6: tile(m, 6, 1, VECTORS, c); break;
        }
}

/* y [rows, out] = x [rows, in] W, or y += x W with accumulate. Strides are in elements. */
void
splitserve_panel_matmul(const float *x, ptrdiff_t x_stride, const float *w, ptrdiff_t in,
                        ptrdiff_t out, float *y, ptrdiff_t y_stride, ptrdiff_t rows,
                        int accumulate, int threads)
{
    ptrdiff_t panels = out / PANEL, at_once = rows == 1 ? SIDE_BY_SIDE : 1;
    ptrdiff_t bands = (panels + at_once - 1) / at_once;
    ptrdiff_t blocks = (rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (ptrdiff_t item = 0; item < bands * blocks; item++) {
        ptrdiff_t p = item / blocks * at_once, first = item % blocks * ROWS_PER_ITEM;
        ptrdiff_t last = first + ROWS_PER_ITEM < rows ? first + ROWS_PER_ITEM : rows;
        struct product m = {x + first * x_stride, x_stride, w + p * PANEL * in, in,
                            y + first * y_stride + p * PANEL, y_stride, accumulate};
        if (rows == 1) {
            one_row(m, panels - p < at_once ? (int)(panels - p) : (int)at_once);
            continue;
        }
        for (ptrdiff_t r = first; r < last; r += GROUP) {
            several_rows(m, last - r < GROUP ? (int)(last - r) : GROUP);
            m.x += GROUP * x_stride;
            m.y += GROUP * y_stride;
        }
    }
}

/* y [rows, heads, width] = x / sqrt(mean(x^2) + eps) * weight over the last dimension; y is
 * contiguous, x has a stride between rows and one between heads. width is a multiple of 16. */
void
splitserve_rms_norm(const float *x, ptrdiff_t row_stride, ptrdiff_t head_stride,
                    const float *weight, float *y, ptrdiff_t rows, ptrdiff_t heads,
                    ptrdiff_t width, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if (rows * heads * width > SERIAL_FLOATS)
    for (ptrdiff_t i = 0; i < rows * heads; i++) {
        const float *from = x + i / heads * row_stride + i % heads * head_stride;
        lanes squares = {0};
        for (ptrdiff_t c = 0; c < width; c += LANES)
            squares += load(from + c) * load(from + c);
        float sum = 0;
        for (int lane = 0; lane < LANES; lane++)
            sum += squares[lane];
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (ptrdiff_t c = 0; c < width; c += LANES)
            store(y + i * width + c, load(from + c) * scale * load(weight + c), 0);
    }
}

/* ---- attention of one new token per sequence over paged keys and values ---------------------- */

typedef int whole_lanes __attribute__((vector_size(LANES * sizeof(int)), aligned(sizeof(int))));

/* e^x for x <= 0, to about one unit in the last place; Cody-Waite reduction and a polynomial. */
static inline __attribute__((always_inline)) lanes
exp_lanes(lanes x)
{
    const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    lanes low = (lanes){0} - 87.0f;
    whole_lanes below = x < low;
    x = (lanes)((below & (whole_lanes)low) | (~below & (whole_lanes)x));
    lanes n = (x * 1.44269504f + rounder) - rounder;
    lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    whole_lanes exponent = (__builtin_convertvector(n, whole_lanes) + 127) << 23;
    return p * (lanes)exponent;
}

/* Halves are added until one lane is left: in registers where the compiler has a shuffle for it. */
static inline __attribute__((always_inline)) float
sum_lanes(lanes v)
{
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return v[0];
#else
    float parts[LANES];
    store(parts, v, 0);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            parts[lane] += parts[lane + half];
    return parts[0];
#endif
}

struct pages {
    float *keys, *values; /* of one layer and one KV head */
    ptrdiff_t block_stride, token_stride;
    const long long *table; /* block numbers of one sequence */
    ptrdiff_t block_tokens;
};

static inline ptrdiff_t
place(const struct pages *p, ptrdiff_t position)
{
    return (ptrdiff_t)p->table[position / p->block_tokens] * p->block_stride
           + position % p->block_tokens * p->token_stride;
}

/* How many positions from this one on lie in its block, up to `last`. */
static inline ptrdiff_t
run_length(const struct pages *p, ptrdiff_t position, ptrdiff_t last)
{
    ptrdiff_t left = p->block_tokens - position % p->block_tokens;
    return left < last - position ? left : last - position;
}

/* Blocks lie far apart, so no hardware prefetcher sees the next one coming. */
static void
fetch_run(const struct pages *p, const float *base, ptrdiff_t width, ptrdiff_t t, ptrdiff_t last)
{
    if (t >= last)
        return;
    const float *row = base + place(p, t);
    for (ptrdiff_t i = run_length(p, t, last); i > 0; i--, row += p->token_stride)
        for (ptrdiff_t c = 0; c < width; c += LANES)
            __builtin_prefetch(row + c, 0, 3);
}

/* scores[i] = scale * query . key[first + i]; returns the largest. */
static float
score(const struct pages *p, const float *query, ptrdiff_t width, ptrdiff_t first, ptrdiff_t last,
      float scale, float *scores, int cold)
{
    float largest = -INFINITY;
    for (ptrdiff_t t = first, run; t < last; t += run) {
        const float *key = p->keys + place(p, t);
        run = run_length(p, t, last);
        if (cold)
            fetch_run(p, p->keys, width, t + run, last);
        for (ptrdiff_t i = 0; i < run; i++, key += p->token_stride) {
            lanes sum = {0};
            for (ptrdiff_t c = 0; c < width; c += LANES)
                sum += load(query + c) * load(key + c);
            float value = sum_lanes(sum) * scale;
            scores[t - first + i] = value;
            largest = value > largest ? value : largest;
        }
    }
    return largest;
}

/* `vectors` * 16 columns of: sum of weights[i] * value[first + i], divided by `total`. */
static inline __attribute__((always_inline)) void
mix_columns(const struct pages *p, const float *weights, int vectors, ptrdiff_t c, ptrdiff_t first,
            ptrdiff_t last, float total, float *out, int cold)
{
    lanes sum[4];
    for (int v = 0; v < vectors; v++)
        sum[v] = (lanes){0};
    for (ptrdiff_t t = first, run; t < last; t += run) {
        const float *value = p->values + place(p, t) + c;
        run = run_length(p, t, last);
        if (cold)
            fetch_run(p, p->values + c, vectors * LANES, t + run, last);
        for (ptrdiff_t i = 0; i < run; i++, value += p->token_stride)
            for (int v = 0; v < vectors; v++)
                sum[v] += load(value + v * LANES) * weights[t - first + i];
    }
    for (int v = 0; v < vectors; v++)
        store(out + c + v * LANES, sum[v] / total, 0);
}

static void
mix(const struct pages *p, const float *weights, ptrdiff_t width, ptrdiff_t first, ptrdiff_t last,
    float total, float *out, int cold)
{
    ptrdiff_t c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES)
        mix_columns(p, weights, 4, c, first, last, total, out, cold);
    for (; c < width; c += LANES)
        mix_columns(p, weights, 1, c, first, last, total, out, cold);
}

/* One query head over positions first .. last-1. `scores` has room for them and 15 more. `cold`:
 * the first head to read these pages fetches them ahead. */
static void
attend_head(const struct pages *p, const float *query, ptrdiff_t width, ptrdiff_t first,
            ptrdiff_t last, float scale, float *scores, float *out, int cold)
{
    ptrdiff_t count = last - first;
    float largest = score(p, query, width, first, last, scale, scores, cold);
    for (ptrdiff_t i = count; i % LANES; i++)
        scores[i] = -INFINITY;
    lanes sum = {0};
    for (ptrdiff_t i = 0; i < count; i += LANES) {
        lanes weight = exp_lanes(load(scores + i) - largest);
        for (ptrdiff_t lane = count - i; lane < LANES; lane++)
            weight[lane] = 0;
        store(scores + i, weight, 0);
        sum += weight;
    }
    mix(p, scores, width, first, last, sum_lanes(sum), out, cold);
}

/* For every sequence and KV head: put the new key and value in their page, then let the query
 * heads of that KV head attend to the `lengths[s]` tokens so far (the last `window` of them when
 * window is not 0). query [n, heads, width], key and value [n, kv_heads, width] with row strides,
 * out [n, heads, width] contiguous, scores [n, heads, score_stride]. */
void
splitserve_paged_attention(const float *query, ptrdiff_t query_stride, const float *key,
                           const float *value, ptrdiff_t key_stride, ptrdiff_t value_stride,
                           float *key_pages, float *value_pages, ptrdiff_t block_stride,
                           ptrdiff_t token_stride, ptrdiff_t block_tokens, const long long *table,
                           ptrdiff_t table_stride, const long long *lengths, ptrdiff_t sequences,
                           ptrdiff_t heads, ptrdiff_t kv_heads, ptrdiff_t width, ptrdiff_t window,
                           float scale, float *scores, ptrdiff_t score_stride, float *out,
                           int threads)
{
    ptrdiff_t fan = heads / kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (ptrdiff_t item = 0; item < sequences * kv_heads; item++) {
        ptrdiff_t s = item / kv_heads, h = item % kv_heads, last = (ptrdiff_t)lengths[s];
        ptrdiff_t first = window && last > window ? last - window : 0;
        struct pages p = {key_pages + h * width, value_pages + h * width, block_stride,
                          token_stride, table + s * table_stride, block_tokens};
        ptrdiff_t at = place(&p, last - 1);
        for (ptrdiff_t c = 0; c < width; c++) {
            p.keys[at + c] = key[s * key_stride + h * width + c];
            p.values[at + c] = value[s * value_stride + h * width + c];
        }
        for (ptrdiff_t q = h * fan; q < (h + 1) * fan; q++)
            attend_head(&p, query + s * query_stride + q * width, width, first, last, scale,
                        scores + (s * heads + q) * score_stride, out + (s * heads + q) * width,
                        q == h * fan);
    }
}
