/* Places in a scan where decoding can start. */

#ifndef PIXELS_MARKS_H
#define PIXELS_MARKS_H

#include <stddef.h>
#include <stdint.h>

enum { COMPONENTS_MAX = 4 /* of a scan, says T.81 */ };

struct mark {
    int64_t mcu;
    size_t offset; /* in bytes, with stuffed zeros */
    int bit;       /* of that byte; 0 is the highest */
    int dc[COMPONENTS_MAX];
};

/* Those that are known of a scan, in their order. */
struct marks {
    struct mark *all;
    size_t count, bytes;
};

/* Room for so many, of which there are none yet. Returns 0 where there is no memory. */
int marks_begin(struct marks *marks, size_t count);

/* One more, for which there is room: of an MCU that begins here, with no bit before it. */
struct mark *marks_add(struct marks *marks, int64_t mcu, size_t offset);

void marks_free(struct marks *marks);

#endif
