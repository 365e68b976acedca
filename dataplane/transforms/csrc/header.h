/* The facts in the header of an image. */

#ifndef PIXELS_HEADER_H
#define PIXELS_HEADER_H

#include <stdint.h>

#include "../../compiler.h"
#include "image.h"

/* "Stored": as the rows lie in the file. "Seen": with the orientation applied. */
struct header {
    int32_t height, width; /* as stored */
    int orientation;       /* EXIF's or XMP's, 1..8 */
};

/* Are the stored rows columns of what is seen? */
INLINE int is_transposing(int orientation)
{
    return orientation >= 5;
}

/* DONE and the header, or FAILED and the reason. FOR_PILLOW: it is not a JPEG, or says how to turn it
 * in an unusual way. */
enum outcome jpeg_header(const struct image *image, struct header *header, char *reason);

#endif
