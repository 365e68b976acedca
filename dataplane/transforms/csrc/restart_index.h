/* Marks of a scan that are kept between decodings: see restart_index.c. */

#ifndef PIXELS_RESTART_INDEX_H
#define PIXELS_RESTART_INDEX_H

#include <stdint.h>

#include "marks.h"
#include "scan.h"

/* Memory in which marks of a scan are noted and found. NULL if there is none. */
struct restart_index {
    uint8_t *bytes;
    int64_t length;
};

/* A restart index in use. */
struct noting {
    uint8_t *bytes;
    int components, mark_bytes;
    int64_t step, per_row, all; /* MCUs from mark to mark; marks of a row, and of the image */
    int64_t mcus_per_row;
    int64_t known, noted; /* marks found, and marks now */
    int64_t due;          /* the MCU before which a mark is to be noted */
};

/* No restart index: nothing is due. */
void restart_index_none(struct noting *noting);

/*
 * Use the marks of earlier crops, and note more. `marks` are those of the scan's begin, which knows
 * the needed rows and columns; `mcu_width` is in pixels of the whole image.
 */
void restart_index_follow(struct noting *noting, struct marks *marks, const struct scan *scan,
                          int components, int mcu_width,
                          const struct restart_index *restart_index);

/* The next MCU to read begins here. */
void restart_index_note(struct noting *noting, const struct mark *mark);

/* Publish the notes for other crops. */
void restart_index_leave(const struct noting *noting);

#endif
