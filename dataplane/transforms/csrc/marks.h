/* Places in a scan where decoding can start. */

#ifndef PIXELS_MARKS_H
#define PIXELS_MARKS_H

#include <stddef.h>
#include <stdint.h>

enum { COMPONENTS_MAX = 4 /* of a scan, T.81 */ };

struct mark {
    int64_t mcu;
    size_t offset; /* in bytes, with stuffed zeros */
    int bit;       /* of that byte; 0 is the highest */
    int dc[COMPONENTS_MAX];
};

/* The known marks of a scan, in order. */
struct marks {
    struct mark *all;
    size_t count, bytes;
};

/* Make room for this many marks, and start with none. Returns 0 if there is no memory. */
int marks_begin(struct marks *marks, size_t count);

/* Add a mark, for which there is room: an MCU begins at this byte. */
struct mark *marks_add(struct marks *marks, int64_t mcu, size_t offset);

void marks_free(struct marks *marks);

#endif
