/* Huffman decoding of what a crop needs: see entropy.c. */

#ifndef PIXELS_ENTROPY_H
#define PIXELS_ENTROPY_H

#include <stdio.h>
#include <jpeglib.h> /* needs stdio.h */

#include "pixels.h"

enum {
    FAST_BITS = 10,
    COMPONENTS_MAX = MAX_COMPS_IN_SCAN,
    MARK_SLACK = 16 /* bytes behind a mark, within which the MCU before it has ended */
};

enum entropy_fault { ENTROPY_FINE, ENTROPY_BROKEN, ENTROPY_NO_MEMORY };

/* A Huffman table, as it is looked at. */
struct codes {
    uint32_t entries[1 << FAST_BITS];
    uint32_t ends[17]; /* of the codes of a length, as the upper bits of 16 */
    int offsets[17];   /* of a code's symbol, from the code */
    uint8_t symbols[256];
    UINT8 bits[17], values[256]; /* what it was made from */
    int is_made;
};

/* A place in a scan where decoding can start. */
struct mark {
    int64_t mcu;
    size_t offset; /* in bytes, with stuffed zeros */
    int bit;       /* of that byte; 0 is the highest */
    int dc[COMPONENTS_MAX];
};

struct block_plan {
    const struct codes *dc, *ac;
    int component;
};

/* A trail under way: see trail.c. */
struct noting {
    uint8_t *bytes;
    int components, mark_bytes;
    int64_t step, per_row, all; /* MCUs from mark to mark; marks of a row, and of the image */
    int64_t known, noted;       /* how many there were, and are */
};

/* The bits that were read ahead, and where more come from. */
struct reader {
    uint64_t word;
    uint64_t count; /* of bits in the word, less than 64 */
    const uint8_t *next;
};

/* A scan under way. */
struct entropy {
    const uint8_t *scan; /* with stuffed zeros and restart markers, and whatever follows */
    size_t scan_bytes;
    int64_t mcus_per_row, mcu_rows;
    int64_t row_first, row_last, column_first, column_last; /* the MCUs that are needed */
    int64_t mcu_asked; /* by libjpeg, next */
    int block_count;
    struct block_plan blocks[D_MAX_BLOCKS_IN_MCU];

    struct mark *marks;
    size_t mark_count, mark_at, marks_bytes;
    int is_restarting;
    struct noting noting;
    int64_t mcu_due; /* before which a mark is to be noted */

    uint8_t *window; /* part of the scan, without stuffed zeros */
    const uint8_t *window_end;
    size_t window_bytes;
    int64_t mcu_next, mcu_covered; /* that the reader is at; the first that the window may lack */
    size_t passed, passed_stuffed; /* a byte of the window, and where it is in the scan */
    struct reader reader;
    int last_dc[COMPONENTS_MAX];

    struct codes dc_codes[NUM_HUFF_TBLS], ac_codes[NUM_HUFF_TBLS];
    JCOEF nowhere[DCTSIZE2];
};

void entropy_prepare(void);

/* A scan that libjpeg has just begun. Returns 0 where libjpeg must decode it itself. */
int entropy_begin(struct entropy *entropy, j_decompress_ptr cinfo);

/* After entropy_begin, and where it is known what is needed: use these marks beside the start. */
struct mark *entropy_room_for_marks(struct entropy *entropy, size_t count);

/* The next MCU that libjpeg asks for: its coefficients, or nothing if it is not needed. */
enum entropy_fault entropy_mcu(struct entropy *entropy, JBLOCKROW *blocks);

void entropy_free(struct entropy *entropy);

#endif
