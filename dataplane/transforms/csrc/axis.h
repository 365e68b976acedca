/* One direction of a resize: which pixels make a result, and how much each of them counts. */

#ifndef PIXELS_AXIS_H
#define PIXELS_AXIS_H

#include <stdint.h>

enum { WEIGHT_BITS = 14, WEIGHT_ONE = 1 << WEIGHT_BITS };

/* Result i is the sum of `taps` pixels from starts[i] on, weighted. */
struct axis {
    int count, taps; /* an even number */
    int first, end;  /* of the source's pixels that have any weight */
    int *starts;
    int16_t *weights; /* [count, taps], each row's sum is WEIGHT_ONE */
};

/* How large the tables are: `count` results from an extent of a source that has `size` pixels. */
void axis_measure(struct axis *axis, int size, double extent, int count);

/* The tables, for which there is room now; mirrored, the first result is the last. */
void axis_fill(struct axis *axis, int size, double begin, double extent, int is_mirrored);

#endif
