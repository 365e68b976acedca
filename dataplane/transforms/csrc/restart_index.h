/* Marks of a scan that are kept from one decoding to the next: see restart_index.c. */

#ifndef PIXELS_RESTART_INDEX_H
#define PIXELS_RESTART_INDEX_H

#include <stdint.h>

#include "marks.h"
#include "scan.h"

/* Memory in which marks of a scan are noted, and found. NULL where there is none. */
struct restart_index {
    uint8_t *bytes;
    int64_t length;
};

/* A restart index under way. */
struct noting {
    uint8_t *bytes;
    int components, mark_bytes;
    int64_t step, per_row, all; /* MCUs from mark to mark; marks of a row, and of the image */
    int64_t mcus_per_row;
    int64_t known, noted; /* how many there were, and are */
    int64_t due;          /* the MCU before which a mark is to be noted */
};

/* No restart index: nothing is due. */
void restart_index_none(struct noting *noting);

/*
 * Use the marks of those who came by before, and note more. `marks` are those of the scan's begin,
 * where the rows and columns that are needed are known; `mcu_width` is in pixels of the whole image.
 */
void restart_index_follow(struct noting *noting, struct marks *marks, const struct scan *scan,
                          int components, int mcu_width,
                          const struct restart_index *restart_index);

/* The MCU that is about to be read begins here. */
void restart_index_note(struct noting *noting, const struct mark *mark);

/* What was noted is there for others. */
void restart_index_leave(const struct noting *noting);

#endif
