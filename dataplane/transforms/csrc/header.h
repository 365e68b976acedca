/* What the header of an image says. */

#ifndef PIXELS_HEADER_H
#define PIXELS_HEADER_H

#include <stdint.h>

#include "../../compiler.h"
#include "image.h"

/* "Stored" is an image as its rows lie in the file; "seen" is what its orientation makes of it. */
struct header {
    int32_t height, width; /* as stored */
    int orientation;       /* EXIF's, 1..8 */
};

/* Are the stored rows columns of what is seen? */
INLINE int is_transposing(int orientation)
{
    return orientation >= 5;
}

/* DONE and the header, FOR_PILLOW where it is not a JPEG, or FAILED and the reason. */
enum outcome jpeg_header(const struct image *image, struct header *header, char *reason);

#endif
