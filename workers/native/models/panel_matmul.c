/* Rows times matrix, float32, for decode steps and prefill chunks alike.
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
#include <stddef.h>

#define PANEL 64
#define LANES 16
#define GROUP 6          /* rows per register tile */
#define DEPTH 64         /* products summed in a register before they join the total */
#define ROWS_PER_ITEM 96 /* rows per unit of work, a multiple of GROUP */

/* A tile of 6 rows x 64 columns takes 24 of AVX-512's 32 registers; elsewhere 6 x 16 must do. */
#if defined(__AVX512F__)
#define VECTORS 4
#else
#define VECTORS 1
#endif

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

/* Adds the product of columns first .. last of x and rows first .. last of w to total. */
static inline __attribute__((always_inline)) void
tile_part(int rows, int vectors, const float *x, ptrdiff_t x_stride, const float *w,
          ptrdiff_t first, ptrdiff_t last, lanes total[GROUP][4])
{
    lanes sum[GROUP][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            sum[r][v] = (lanes){0};
    for (ptrdiff_t k = first; k < last; k++) {
        lanes column[4];
        for (int v = 0; v < vectors; v++)
            column[v] = *(const lanes *)(w + k * PANEL + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++)
                sum[r][v] += column[v] * x[r * x_stride + k];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] += sum[r][v];
}

static inline __attribute__((always_inline)) void
tile(int rows, int vectors, const float *x, ptrdiff_t x_stride, const float *w, ptrdiff_t in,
     float *y, ptrdiff_t y_stride, int accumulate)
{
    lanes total[GROUP][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] = (lanes){0};
    for (ptrdiff_t k = 0; k < in; k += DEPTH)
        tile_part(rows, vectors, x, x_stride, w, k, k + DEPTH < in ? k + DEPTH : in, total);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            lanes *to = (lanes *)(y + r * y_stride + v * LANES);
            *to = accumulate ? *to + total[r][v] : total[r][v];
        }
}

static void
panel(int rows, const float *x, ptrdiff_t x_stride, const float *w, ptrdiff_t in, float *y,
      ptrdiff_t y_stride, int accumulate)
{
    if (rows == 1) { /* one row fits everywhere at full width */
        tile(1, 4, x, x_stride, w, in, y, y_stride, accumulate);
        return;
    }
    for (int c = 0; c < PANEL; c += VECTORS * LANES) {
        switch (rows) {
#define CASE(N)                                                                       \
    case N:                                                                           \
        tile(N, VECTORS, x, x_stride, w + c, in, y + c, y_stride, accumulate);        \
        break;
            CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        }
    }
}

/* y [rows, out] = x [rows, in] W, or y += x W with accumulate. Strides are in elements. */
void
splitserve_panel_matmul(const float *x, ptrdiff_t x_stride, const float *w, ptrdiff_t in,
                        ptrdiff_t out, float *y, ptrdiff_t y_stride, ptrdiff_t rows,
                        int accumulate, int threads)
{
    ptrdiff_t panels = out / PANEL;
    ptrdiff_t blocks = (rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (ptrdiff_t item = 0; item < panels * blocks; item++) {
        ptrdiff_t p = item / blocks, first = item % blocks * ROWS_PER_ITEM;
        ptrdiff_t last = first + ROWS_PER_ITEM < rows ? first + ROWS_PER_ITEM : rows;
        for (ptrdiff_t r = first; r < last; r += GROUP)
            panel(last - r < GROUP ? (int)(last - r) : GROUP, x + r * x_stride, x_stride,
                  w + p * PANEL * in, in, y + r * y_stride + p * PANEL, y_stride, accumulate);
    }
}
