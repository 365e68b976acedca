/* One direction of a resize: the pixels of each result, and their weights. */

#ifndef PIXELS_AXIS_H
#define PIXELS_AXIS_H

#include <stdint.h>

enum { WEIGHT_BITS = 14, WEIGHT_ONE = 1 << WEIGHT_BITS };

/* Result i is the weighted sum of `taps` pixels from starts[i] on. */
struct axis {
    int count, taps; /* an even number */
    int first, end;  /* range of the source's pixels with any weight */
    int *starts;
    int16_t *weights; /* [count, taps], each row's sum is WEIGHT_ONE */
};

/* The size of the tables: `count` results from an extent of a source of `size` pixels. */
void axis_measure(struct axis *axis, int size, double extent, int count);

/* Fill the tables, which have room; if mirrored, the first result is the last. */
void axis_fill(struct axis *axis, int size, double begin, double extent, int is_mirrored);

#endif
