/* The facts in the header of an image. */

#ifndef PIXELS_HEADER_H
#define PIXELS_HEADER_H

#include <stdint.h>

#include "../../compiler.h"
#include "image.h"

/* "Stored": as the rows lie in the file. "Seen": with the orientation applied. */
struct header {
    int32_t height, width; /* as stored */
    int orientation;       /* EXIF's, 1..8 */
};

/* Are the stored rows columns of what is seen? */
INLINE int is_transposing(int orientation)
{
    return orientation >= 5;
}

/* DONE and the header, FOR_PILLOW if it is not a JPEG, or FAILED and the reason. */
enum outcome jpeg_header(const struct image *image, struct header *header, char *reason);

#endif
