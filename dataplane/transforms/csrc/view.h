/* The form of every image of a column: size, layout and numbers. */

#ifndef PIXELS_VIEW_H
#define PIXELS_VIEW_H

#include <stdint.h>

#include "image.h"

enum dtype { BYTE, HALF, BFLOAT, FLOAT };

enum { SUM_BITS = 20 /* fraction of the sums that become values */ };

/* Same layout as in pixels.py. A value v of 0..255 becomes v * scale + bias, of its channel. */
struct view {
    int32_t height, width, is_planar, dtype;
    float scale[CHANNELS], bias[CHANNELS];
};

/* Of one number. */
int dtype_bytes(enum dtype dtype);

/*
 * Sums of 1/2**SUM_BITS become numbers: rounded, or sum * scale + bias, for each lane. So the scale
 * of a lane is that of the view divided by 2**SUM_BITS.
 */
void view_write(const int32_t *restrict sums, const float *restrict scale,
                const float *restrict bias, int lanes, int dtype, void *restrict out);

#endif
