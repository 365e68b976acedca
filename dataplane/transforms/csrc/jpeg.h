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
 * Is the loaded library the one that the headers describe? Returns 0 and the reason if not; always
 * returns the path that it was loaded from.
 */
int jpeg_open(char *path, char *reason);

struct decoder; /* One thread's: the state that libjpeg and the resize keep between images. */

struct decoder *decoder_new(void);
void decoder_free(struct decoder *decoder);

/*
 * Render the box of an image with this header: DONE, FAILED and the reason, or FOR_PILLOW. Only if
 * it `may_reduce` is the image decoded at 1/2, 1/4 or 1/8 scale, if that is enough.
 */
enum outcome jpeg_render(struct decoder *decoder, const struct image *image,
                         const struct restart_index *restart_index, const struct header *header,
                         const struct box *box, const struct view *view, int may_reduce,
                         uint8_t *out, char *reason);

#endif
