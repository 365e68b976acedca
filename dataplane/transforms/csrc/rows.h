/* The two sums of a resize: over the pixels of a row, and over rows. */

#ifndef PIXELS_ROWS_H
#define PIXELS_ROWS_H

#include <stdint.h>

#include "axis.h"
#include "view.h"

enum {
    ROW_BITS = SUM_BITS - WEIGHT_BITS, /* fraction of a pixel after the first direction */
    ROW_SLACK = 8                      /* numbers that row_resize may write behind a row */
};

/*
 * A row of RGBX pixels, starting with pixel `from`, resized in width: to 3 * columns->count numbers
 * of 1/2**ROW_BITS, as planes or pixel by pixel.
 */
void row_resize(const struct axis *columns, const uint8_t *pixels, int from, int is_planar,
                int16_t *out);

/* The weighted sum of such rows, of 1/2**SUM_BITS. */
void rows_sum(const int16_t *const *rows, const int16_t *weights, int taps, int lanes,
              int32_t *restrict sums);

#endif
