/*
 * What kernel.py calls, through ctypes, which releases the interpreter's lock. Arguments have
 * numpy's layout:
 *
 *   index    int32[count, 2]: (block, row), in memory that nobody else writes
 *   sources  one column's part of block b is sources[b * stride]
 *
 * A function returns -1, or the index of the first row that is out of bounds; its writes until then
 * are within `out`. Every address may be unaligned.
 */

#ifndef KERNEL_H
#define KERNEL_H

#include <stdint.h>

#include "../compiler.h"

struct source {
    const char *values;   /* fixed rows, or runs with bounds in `starts` */
    const char *starts;   /* int32 or int64[rows + 1], in elements */
    const uint8_t *valid; /* uint8[rows], or NULL if all are valid */
    int64_t count;        /* elements of `values`, where there are starts */
    int64_t start_bytes;  /* 4 or 8; 0 without starts */
};

struct field {
    int64_t at;    /* in a packed row */
    int64_t bytes; /* at most to the end of the row */
    char *column;  /* the values of all rows, one after the other */
};

/* A record batch in Arrow's C data interface; its columns are its children. */
struct exported {
    int64_t length;
    int64_t null_count;
    int64_t offset;
    int64_t buffers_count;
    int64_t children_count;
    const void *const *buffers;
    const struct exported *const *children;
};

/* The packs of one block: where the pieces of each pack start, and where the last ones end. */
struct packs {
    const int32_t *starts;
    const int32_t *pieces; /* of all: rows; then begins; then lengths; then places */
    int64_t pieces_count;
    int64_t count;
    const struct source *sources; /* the block's, by column */
    int64_t rows;                 /* of the block */
};

/* What a column of packs has: docs/packing.md. All but tokens and labels is int32. */
enum pack_kind { TOKENS, LABELS, POSITIONS, DOCUMENTS, CUTS, LONGEST, LENGTHS };

struct pack_column {
    int64_t kind;
    char *out; /* rows of the slab */
    int64_t row_bytes;
    int64_t source;        /* where tokens come from: a column of blocks, */
    int64_t element_bytes; /* the size of its values, */
    int64_t is_signed;     /* and whether they are signed integers */
    int64_t padding;       /* in the first bytes; of labels: int64 */
    int64_t out_bytes;     /* the size of what is written: element_bytes, 4 or 8 */
    int64_t mask;          /* of labels: a column of blocks that is 0 where there is none, or -1, */
    int64_t mask_bytes;    /* and the size of its values */
};

/* A row of the index is a pack: these bits are its number, those above say which table it is in. */
enum { PACK_BITS = 24 };

struct packing {
    const struct packs *packs;
    const int64_t *tables; /* the first of each block, and where those of the last one end */
    int64_t blocks;
    const struct pack_column *columns; /* the first has tokens */
    int64_t columns_count;
    int64_t length;   /* of a pack, in tokens */
    int64_t multiple; /* documents start at multiples of so many */
    int64_t cuts;     /* how many numbers a row of CUTS has; one of LENGTHS has two less */
};

/* One of its columns. */
struct placed {
    int64_t length;
    int64_t null_count; /* 0 without validity, -1 if not counted */
    int64_t offset;     /* in rows */
    const void *values; /* the second buffer, or NULL */
};

EXPORT int64_t gather_check(const int32_t *index, int64_t count, const int64_t *block_rows,
                            int64_t blocks);

EXPORT void gather_fixed(const struct source *sources, int64_t stride, const int32_t *index,
                         int64_t count, int64_t row_bytes, char *out);

EXPORT int64_t gather_spans(const struct source *sources, int64_t stride, const int32_t *index,
                            int64_t count, int64_t *starts, int64_t *lengths);

EXPORT int64_t gather_runs(const struct source *sources, int64_t stride, const int32_t *index,
                           int64_t count, int64_t element_bytes, const int64_t *starts,
                           const int64_t *lengths, const int64_t *put, const int64_t *room,
                           char *out, int64_t out_bytes, const char *padding);

/* Writes packs into rows rows[i] of the columns. All but these numbers is checked. */
EXPORT int64_t gather_packs(const struct packing *packing, const int32_t *index,
                            const int64_t *rows, int64_t count);

EXPORT void gather_valid(const struct source *sources, int64_t stride, const int32_t *index,
                         int64_t count, uint8_t *out);

EXPORT void pack_rows(const struct field *fields, int64_t fields_count, int64_t count,
                      int64_t row_bytes, char *out);

EXPORT void gather_packed(const struct source *sources, int64_t stride, const int32_t *index,
                          int64_t count, int64_t row_bytes, const struct field *fields,
                          int64_t fields_count);

EXPORT void place_columns(const struct exported *batch, struct placed *out);

/* Checksum of the sources it was compiled from: kernel.py accepts only its own. */
EXPORT uint32_t gather_source_crc(void);

#endif
