/* Marks of a scan that are kept from one decoding to the next: see trail.c. */

#ifndef PIXELS_TRAIL_H
#define PIXELS_TRAIL_H

#include <stdint.h>

#include "marks.h"
#include "scan.h"

/* Memory in which marks of a scan are noted, and found. NULL where there is none. */
struct trail {
    uint8_t *bytes;
    int64_t length;
};

/* A trail under way. */
struct noting {
    uint8_t *bytes;
    int components, mark_bytes;
    int64_t step, per_row, all; /* MCUs from mark to mark; marks of a row, and of the image */
    int64_t mcus_per_row;
    int64_t known, noted; /* how many there were, and are */
    int64_t due;          /* the MCU before which a mark is to be noted */
};

/* No trail: nothing is due. */
void trail_none(struct noting *noting);

/*
 * Use the marks of those who came by before, and note more. `marks` are those of the scan's begin,
 * where the rows and columns that are needed are known; `mcu_width` is in pixels of the whole image.
 */
void trail_follow(struct noting *noting, struct marks *marks, const struct scan *scan,
                  int components, int mcu_width, const struct trail *trail);

/* The MCU that is about to be read begins here. */
void trail_note(struct noting *noting, const struct mark *mark);

/* What was noted is there for others. */
void trail_leave(const struct noting *noting);

#endif
