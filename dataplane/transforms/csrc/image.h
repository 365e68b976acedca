/* An encoded image in memory, and the possible outcomes. */

#ifndef PIXELS_IMAGE_H
#define PIXELS_IMAGE_H

#include <stdint.h>

/* Bytes of an error's reason; bytes of one decoded pixel, RGBX; Pillow's limit of pixels. */
enum { REASON_BYTES = 256, PIXEL_BYTES = 4, CHANNELS = 3, PIXELS_MAX = 178956970 };

enum outcome { DONE, FOR_PILLOW, FAILED };

struct image {
    const uint8_t *bytes;
    int64_t length;
};

#endif
