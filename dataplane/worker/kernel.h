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

/*
 * As gather_runs, for numbers that become int64: `is_signed` says how those of the source are read.
 * The rest of the room of a run gets `rest`. Everything but `element_bytes` is in numbers.
 */
EXPORT int64_t gather_wide_runs(const struct source *sources, int64_t stride, const int32_t *index,
                                int64_t count, int64_t element_bytes, int64_t is_signed,
                                const int64_t *starts, const int64_t *lengths, const int64_t *put,
                                const int64_t *room, int64_t *out, int64_t out_count, int64_t rest);

/*
 * Lists the pieces of packs: row i is pack numbers[i] of packs[tables[i]]. `out` gets, of each piece:
 * its table, its row, its begin, its length, its place, i, and its number in the pack; `room` is how
 * many there may be. Returns how many there are, or -1 - i if there is no such pack or no room.
 */
EXPORT int64_t list_pieces(const struct packs *packs, int64_t packs_count, const int64_t *tables,
                           const int64_t *numbers, int64_t count, int64_t *out, int64_t room);

/* Fills run i of `out`, room[i] numbers from put[i] on: with first[i], first[i] + step, ... */
EXPORT int64_t fill_runs(int64_t count, const int64_t *put, const int64_t *room,
                         const int32_t *first, int32_t step, int32_t *out, int64_t out_count);

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
