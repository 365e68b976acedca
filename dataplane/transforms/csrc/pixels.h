/*
 * What pixels.py calls, through ctypes, which releases the interpreter's lock: encoded images in
 * memory to resized crops in a slab, in one call. pixels.py describes the arrays.
 *
 * Every coordinate is (row, column) or (height, width) in this order, as in Python. A function that
 * takes many images returns -1, or the index of the first row that failed, and writes its reason.
 */

#ifndef PIXELS_H
#define PIXELS_H

#include <stdint.h>

#include "../../compiler.h"
#include "image.h"
#include "restart_index.h"
#include "view.h"

/* Can libjpeg be used? Returns 0 and the reason if not; always returns the path of the library. */
EXPORT int64_t pixels_open(char *path, char *reason);

EXPORT int64_t pixels_sizes(const struct image *images, int64_t count, int32_t *sizes,
                            uint8_t *outcomes, char *reason);

EXPORT int64_t pixels_render(const struct image *images,
                             const struct restart_index *restart_indexes, int64_t count,
                             const double *boxes, const uint8_t *flips, const struct view *view,
                             int64_t view_bytes, int32_t may_reduce, uint8_t *out,
                             uint8_t *outcomes, char *reason);

/*
 * One image of RGBX pixels, decoded by Pillow. `decoded` is their height and width, `stored` those
 * of the image, of which they are 1/shrink. Returns 0, or 1 if memory ran out.
 */
EXPORT int64_t pixels_resize(const uint8_t *pixels, const int32_t *decoded, const int32_t *stored,
                             int32_t orientation, int32_t shrink, const double *boxes,
                             const uint8_t *flips, const struct view *view, uint8_t *out);

/* Checksum of the sources it was compiled from: pixels_library.py accepts only its own. */
EXPORT uint32_t pixels_source_crc(void);

#endif
