/* Huffman decoding of the MCUs that a crop needs: see entropy.c. */

#ifndef PIXELS_ENTROPY_H
#define PIXELS_ENTROPY_H

#include <stdio.h>
#include <jpeglib.h> /* needs stdio.h */

#include "marks.h"
#include "scan.h"
#include "restart_index.h"

enum { FAST_BITS = 10 };

enum entropy_fault { ENTROPY_FINE, ENTROPY_BROKEN, ENTROPY_NO_MEMORY };

/* A Huffman table, prepared for look-ups. */
struct codes {
    uint32_t entries[1 << FAST_BITS];
    uint32_t ends[17]; /* end of the codes of each length, as the upper bits of 16 */
    int offsets[17];   /* of a code's symbol, from the code */
    uint8_t symbols[256];
    UINT8 bits[17], values[256]; /* the JPEG's table */
    int is_made;
};

struct block_plan {
    const struct codes *dc, *ac;
    int component;
};

/* The bits that were read ahead, and the source of more. */
struct reader {
    uint64_t word;
    uint64_t count; /* of bits in the word, less than 64 */
    const uint8_t *next;
};

/* A scan being decoded. */
struct entropy {
    struct scan scan;
    int64_t mcu_asked; /* by libjpeg, next */
    int block_count;
    struct block_plan blocks[D_MAX_BLOCKS_IN_MCU];

    struct marks marks;
    size_t mark_at;
    int is_restarting;
    struct noting noting;

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

/* A scan that libjpeg has just begun. Returns 0 if libjpeg must decode it itself. */
int entropy_begin(struct entropy *entropy, j_decompress_ptr cinfo);

/* After entropy_begin, once the needed part of the scan is known: as restart_index_follow. */
void entropy_follow(struct entropy *entropy, int components, int mcu_width,
                    const struct restart_index *restart_index);

/* Forget the previous image's notes: none of them is published. */
void entropy_forget(struct entropy *entropy);

/* The image is decoded: publish its notes for other crops. */
void entropy_leave(const struct entropy *entropy);

/* The next MCU that libjpeg requests: its coefficients, or nothing if it is not needed. */
enum entropy_fault entropy_mcu(struct entropy *entropy, JBLOCKROW *blocks);

void entropy_free(struct entropy *entropy);

#endif
