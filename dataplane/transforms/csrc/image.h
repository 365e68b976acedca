/* An encoded image in memory, and what may become of it. */

#ifndef PIXELS_IMAGE_H
#define PIXELS_IMAGE_H

#include <stdint.h>

/* Of the reason why an image failed; of one decoded pixel, RGBX; and as many as Pillow refuses. */
enum { REASON_BYTES = 256, PIXEL_BYTES = 4, CHANNELS = 3, PIXELS_MAX = 178956970 };

enum outcome { DONE, FOR_PILLOW, FAILED };

struct image {
    const uint8_t *bytes;
    int64_t length;
};

#endif
