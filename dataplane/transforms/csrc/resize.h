/* A resize in progress: stored rows go in from top to bottom, and leave as results. */

#ifndef PIXELS_RESIZE_H
#define PIXELS_RESIZE_H

#include <stddef.h>
#include <stdint.h>

#include "axis.h"
#include "box.h"
#include "header.h"
#include "view.h"

struct resize {
    struct axis rows, columns;
    struct view view;
    int is_transposed, is_mirrored_down;
    int row_next, out_next;
    size_t ring_stride;
    int16_t *ring;        /* [rows.taps, ring_stride]: the last rows, resized in width */
    const int16_t **held; /* [rows.taps]: the rows of the ring that one result needs */
    int32_t *sums;        /* [lanes] */
    float *scale, *bias;  /* [lanes] */
    uint8_t *line;        /* [lanes] of the dtype, if the result is transposed */
    uint8_t *out;
    void *memory; /* all of the arrays above */
    size_t memory_bytes;
};

/*
 * Prepare for an image of stored height x width, already shrunk to 1/shrink of that. Returns 0 if
 * there is no memory. Rows before rows.first and from rows.end on are not needed.
 */
int resize_begin(struct resize *resize, const struct header *header, int height, int width,
                 int shrink, const struct box *box, const struct view *view, uint8_t *out);

/* One stored row of RGBX pixels; `pixels` starts at column `from`, and PADDING pixels follow. */
void resize_row(struct resize *resize, const uint8_t *pixels, int from);

/* Pixels behind the last one of a row that may be read, and are not used. */
int resize_padding(const struct resize *resize);

void resize_free(struct resize *resize);

#endif
