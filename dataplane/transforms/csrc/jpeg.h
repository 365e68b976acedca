/* Part of a JPEG, decoded with libjpeg-turbo, row by row into a resize. */

#ifndef PIXELS_JPEG_H
#define PIXELS_JPEG_H

#include <stdint.h>

#include "box.h"
#include "header.h"
#include "image.h"
#include "restart_index.h"
#include "view.h"

enum { PATH_BYTES = 4096 };

/*
 * Is the library that the loader found the one that the headers described? Returns 0, and why, if
 * not; either way where it was loaded from.
 */
int jpeg_open(char *path, char *reason);

struct decoder; /* One thread's: what libjpeg and the resize keep from image to image. */

struct decoder *decoder_new(void);
void decoder_free(struct decoder *decoder);

/*
 * Of an image that has this header, what lies in the box: DONE, FAILED and the reason, or FOR_PILLOW.
 * Only if it `may_reduce` is the image decoded at a half, a quarter or an eighth where that is enough.
 */
enum outcome jpeg_render(struct decoder *decoder, const struct image *image,
                         const struct restart_index *restart_index, const struct header *header,
                         const struct box *box, const struct view *view, int may_reduce,
                         uint8_t *out, char *reason);

#endif
