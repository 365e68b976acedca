/* The triangle filter of a resize, which widens as the image shrinks. */

#include <math.h>
#include <string.h>

#include "axis.h"

enum { TAPS_STEP = 2 };

/*
 * Source: Pillow, src/libImaging/Resample.c: the centre of result i is begin + (i + 0.5) * scale,
 * and a pixel's weight falls linearly to 0 at a distance of max(scale, 1).
 */
void axis_measure(struct axis *axis, int size, double extent, int count)
{
    double scale = extent / count;
    int taps = scale < 1.0 ? 3 : (int)ceil(2.0 * scale) + 1;
    taps = taps > size ? size : taps;
    axis->count = count;
    axis->taps = (taps + TAPS_STEP - 1) / TAPS_STEP * TAPS_STEP;
}

void axis_fill(struct axis *axis, int size, double begin, double extent, int is_mirrored)
{
    int count = axis->count, taps = axis->taps;
    double scale = extent / count, support = scale < 1.0 ? 1.0 : scale;
    axis->first = size;
    axis->end = 0;
    for (int i = 0; i < count; i++) {
        double centre = begin + (i + 0.5) * scale;
        int start = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        start = start < 0 ? 0 : start >= size ? size - 1 : start;
        end = end > size ? size : end <= start ? start + 1 : end;
        end = end > start + taps ? start + taps : end;
        int at = is_mirrored ? count - 1 - i : i;
        int16_t *weights = axis->weights + (size_t)at * (size_t)taps;
        double total = 0.0, sum = 0.0;
        for (int k = start; k < end; k++) {
            double weight = 1.0 - fabs(k + 0.5 - centre) / support;
            total += weight > 0.0 ? weight : 0.0;
        }
        int given = 0;
        memset(weights, 0, (size_t)taps * sizeof *weights);
        for (int k = start; k < end; k++) {
            double weight = 1.0 - fabs(k + 0.5 - centre) / support;
            sum += weight > 0.0 ? weight : 0.0;
            /* The rounded target for the sum of the weights so far: errors do not accumulate. */
            int due = total > 0.0 ? (int)(sum / total * WEIGHT_ONE + 0.5) : WEIGHT_ONE;
            due = k == end - 1 ? WEIGHT_ONE : due;
            weights[k - start] = (int16_t)(due - given);
            given = due;
        }
        axis->starts[at] = start;
        axis->first = start < axis->first ? start : axis->first;
        axis->end = end > axis->end ? end : axis->end;
    }
}
