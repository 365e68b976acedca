/* The part of an image that becomes the result. */

#ifndef PIXELS_BOX_H
#define PIXELS_BOX_H

#include "header.h"

/* In pixels of the upright image, and whether the result is mirrored left-right afterwards. */
struct box {
    double top, left, height, width;
    int is_flipped;
};

/* The box in pixels of the stored image; its direction is in the tables' mirroring. */
struct stored_box {
    double top, left, height, width;
    int is_mirrored_down, is_mirrored_right; /* results run against the stored rows, columns */
};

struct stored_box box_stored(const struct header *header, const struct box *box);

/* 0 if the box does not lie within an image of this upright size. */
int is_box_within(const struct header *header, const struct box *box);

/* The largest shrink of the decoder that leaves height x width pixels: 1, 2, 4 or 8. */
int box_shrink(const struct box *box, int height, int width);

#endif
