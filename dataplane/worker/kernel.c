/*
 * The inner loops of a gather: rows from many blocks, copied one after the other.
 *
 * Packed rows are the small columns of a block, row after row, with the columns of a row side by
 * side: a random read of a row then costs one or two cache misses, not one for each column.
 *
 * Every address may be unaligned, so words are read by memcpy.
 */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

/*
 * The next reads are known and prefetched. A processor that sees a row being read prefetches the
 * rest of it by itself, up to the end of its page, so the first lines of each page are enough.
 * Single words are prefetched much earlier, into the second level cache: the first level waits for
 * only a dozen lines or two at a time.
 */
enum {
    LINE_BYTES = 64,
    PAGE_BYTES = 4096,
    ASKED_BYTES = 512,   /* of each page of a row */
    AHEAD_BYTES = 4096,  /* distance of the prefetched row, */
    AHEAD_ROWS_MAX = 16, /* in rows, at most */
    AHEAD_WORDS = 256,   /* in rows of one word */
    TILE_ROWS = 256      /* packed rows that become columns together, in the nearest caches */
};

INLINE int64_t start_at(const struct source *source, int64_t row)
{
    if (source->start_bytes == (int64_t)sizeof(int32_t)) {
        int32_t found;
        memcpy(&found, source->starts + row * (int64_t)sizeof found, sizeof found);
        return found;
    }
    int64_t found;
    memcpy(&found, source->starts + row * (int64_t)sizeof found, sizeof found);
    return found;
}

INLINE void ask_word(const char *word)
{
    __builtin_prefetch(word, 0, 1);
}

INLINE void ask_row(const char *from, int64_t bytes)
{
    for (int64_t at = 0; at < bytes;) {
        int64_t page_end = at + PAGE_BYTES - (int64_t)((uintptr_t)(from + at) % PAGE_BYTES);
        int64_t asked_end = bytes - at > ASKED_BYTES ? at + ASKED_BYTES : bytes;
        for (; at < asked_end; at += LINE_BYTES)
            __builtin_prefetch(from + at);
        at = page_end;
    }
}

/* Into the second level cache, as for single words. */
INLINE void ask_packed_row(const char *from, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += LINE_BYTES)
        ask_word(from + at);
    ask_word(from + bytes - 1);
}

INLINE int64_t rows_ahead(int64_t row_bytes)
{
    int64_t rows = AHEAD_BYTES / row_bytes;
    return rows < 1 ? 1 : rows > AHEAD_ROWS_MAX ? AHEAD_ROWS_MAX : rows;
}

int64_t gather_check(const int32_t *index, int64_t count, const int64_t *block_rows, int64_t blocks)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t block = index[2 * i], row = index[2 * i + 1];
        if (block < 0 || block >= blocks || row < 0 || row >= block_rows[block])
            return i;
    }
    return -1;
}

INLINE const char *row_at(const struct source *sources, int64_t stride, const int32_t *index,
                          int64_t i, int64_t row_bytes)
{
    return sources[index[2 * i] * stride].values + index[2 * i + 1] * row_bytes;
}

/* If row_bytes is a constant this is a loop of single moves. */
INLINE void short_rows(const struct source *sources, int64_t stride, const int32_t *index,
                       int64_t count, int64_t row_bytes, char *out)
{
    for (int64_t i = 0; i < count; i++) {
        if (i < count - AHEAD_WORDS)
            ask_word(row_at(sources, stride, index, i + AHEAD_WORDS, row_bytes));
        memcpy(out + i * row_bytes, row_at(sources, stride, index, i, row_bytes), row_bytes);
    }
}

static void long_rows(const struct source *sources, int64_t stride, const int32_t *index,
                      int64_t count, int64_t row_bytes, char *out)
{
    int64_t ahead = rows_ahead(row_bytes), known = count - ahead;
    for (int64_t i = 0; i < count; i++) {
        if (i < known)
            ask_row(row_at(sources, stride, index, i + ahead, row_bytes), row_bytes);
        memcpy(out + i * row_bytes, row_at(sources, stride, index, i, row_bytes), row_bytes);
    }
}

void gather_fixed(const struct source *sources, int64_t stride, const int32_t *index, int64_t count,
                  int64_t row_bytes, char *out)
{
    switch (row_bytes) {
    case 1: short_rows(sources, stride, index, count, 1, out); return;
    case 2: short_rows(sources, stride, index, count, 2, out); return;
    case 4: short_rows(sources, stride, index, count, 4, out); return;
    case 8: short_rows(sources, stride, index, count, 8, out); return;
    case 16: short_rows(sources, stride, index, count, 16, out); return;
    default: long_rows(sources, stride, index, count, row_bytes, out);
    }
}

int64_t gather_spans(const struct source *sources, int64_t stride, const int32_t *index,
                     int64_t count, int64_t *starts, int64_t *lengths)
{
    for (int64_t i = 0; i < count; i++) {
        if (i < count - AHEAD_WORDS) {
            const int32_t *later = index + 2 * (i + AHEAD_WORDS);
            const struct source *source = sources + later[0] * stride;
            ask_word(source->starts + later[1] * source->start_bytes);
        }
        const struct source *source = sources + index[2 * i] * stride;
        int64_t row = index[2 * i + 1];
        int64_t start = start_at(source, row), end = start_at(source, row + 1);
        if (start < 0 || end < start || end > source->count)
            return i;
        starts[i] = start;
        lengths[i] = end - start;
    }
    return -1;
}

INLINE int is_within(int64_t start, int64_t length, int64_t end)
{
    return start >= 0 && length >= 0 && start <= end && length <= end - start;
}

/* A run is checked only in its turn: no address outside of its values is computed. */
INLINE void ask_run(const struct source *source, int64_t start, int64_t length,
                    int64_t element_bytes)
{
    if (length > 0 && is_within(start, length, source->count))
        ask_row(source->values + start * element_bytes, length * element_bytes);
}

INLINE void repeat(char *out, int64_t bytes, const char *element, int64_t element_bytes)
{
    for (int64_t at = 0; at + element_bytes <= bytes; at += element_bytes)
        memcpy(out + at, element, element_bytes);
}

/* The rest of a run's room; if element_bytes is a constant this is a loop of single moves. */
static void pad(char *out, int64_t bytes, const char *padding, int64_t element_bytes)
{
    if (padding == NULL) {
        memset(out, 0, bytes);
        return;
    }
    switch (element_bytes) {
    case 1: memset(out, padding[0], bytes); return;
    case 2: repeat(out, bytes, padding, 2); return;
    case 4: repeat(out, bytes, padding, 4); return;
    case 8: repeat(out, bytes, padding, 8); return;
    default: repeat(out, bytes, padding, element_bytes);
    }
}

int64_t gather_runs(const struct source *sources, int64_t stride, const int32_t *index,
                    int64_t count, int64_t element_bytes, const int64_t *starts,
                    const int64_t *lengths, const int64_t *put, const int64_t *room, char *out,
                    int64_t out_bytes, const char *padding)
{
    int64_t known = count - AHEAD_ROWS_MAX;
    for (int64_t i = 0; i < count; i++) {
        const struct source *source = sources + index[2 * i] * stride;
        if (!is_within(starts[i], lengths[i], source->count) ||
            !is_within(put[i], room[i], out_bytes))
            return i;
        int64_t bytes = lengths[i] * element_bytes;
        if (bytes > room[i])
            return i;
        if (i < known) {
            int64_t later = i + AHEAD_ROWS_MAX;
            ask_run(sources + index[2 * later] * stride, starts[later], lengths[later],
                    element_bytes);
        }
        if (bytes > 0)
            memcpy(out + put[i], source->values + starts[i] * element_bytes, bytes);
        if (room[i] > bytes)
            pad(out + put[i] + bytes, room[i] - bytes, padding, element_bytes);
    }
    return -1;
}

#define WIDENED(type)                                                                              \
    for (int64_t i = 0; i < count; i++) {                                                          \
        type number;                                                                               \
        memcpy(&number, from + i * (int64_t)sizeof number, sizeof number);                         \
        out[i] = (int64_t)number;                                                                  \
    }                                                                                              \
    return

static void widen(const char *from, int64_t count, int64_t element_bytes, int64_t is_signed,
                  int64_t *out)
{
    switch (is_signed ? -element_bytes : element_bytes) {
    case -1: WIDENED(int8_t);
    case -2: WIDENED(int16_t);
    case -4: WIDENED(int32_t);
    case 1: WIDENED(uint8_t);
    case 2: WIDENED(uint16_t);
    case 4: WIDENED(uint32_t);
    default: memcpy(out, from, count * (int64_t)sizeof *out);
    }
}

int64_t gather_wide_runs(const struct source *sources, int64_t stride, const int32_t *index,
                         int64_t count, int64_t element_bytes, int64_t is_signed,
                         const int64_t *starts, const int64_t *lengths, const int64_t *put,
                         const int64_t *room, int64_t *out, int64_t out_count, int64_t rest)
{
    for (int64_t i = 0; i < count; i++) {
        const struct source *source = sources + index[2 * i] * stride;
        if (!is_within(starts[i], lengths[i], source->count) ||
            !is_within(put[i], room[i], out_count) || lengths[i] > room[i])
            return i;
        if (lengths[i] > 0)
            widen(source->values + starts[i] * element_bytes, lengths[i], element_bytes, is_signed,
                  out + put[i]);
        for (int64_t at = lengths[i]; at < room[i]; at++)
            out[put[i] + at] = rest;
    }
    return -1;
}

int64_t list_pieces(const struct packs *packs, int64_t packs_count, const int64_t *tables,
                    const int64_t *numbers, int64_t count, int64_t *out, int64_t room)
{
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (tables[i] < 0 || tables[i] >= packs_count)
            return -1 - i;
        const struct packs *own = packs + tables[i];
        if (numbers[i] < 0 || numbers[i] >= own->count)
            return -1 - i;
        int64_t start = own->starts[numbers[i]], end = own->starts[numbers[i] + 1];
        if (!is_within(start, end - start, own->pieces_count) || end - start > room - found)
            return -1 - i;
        for (int64_t at = start; at < end; at++, found++) {
            const int32_t *piece = own->pieces + at;
            int64_t *to = out + found;
            to[0] = tables[i];
            for (int64_t fact = 0; fact < 4; fact++)
                to[(1 + fact) * room] = piece[fact * own->pieces_count];
            to[5 * room] = i;
            to[6 * room] = at - start;
        }
    }
    return found;
}

int64_t fill_runs(int64_t count, const int64_t *put, const int64_t *room, const int32_t *first,
                  int32_t step, int32_t *out, int64_t out_count)
{
    for (int64_t i = 0; i < count; i++) {
        if (!is_within(put[i], room[i], out_count))
            return i;
        int32_t *run = out + put[i], number = first[i];
        int64_t length = room[i];
        for (int64_t at = 0; at < length; at++)
            run[at] = (int32_t)(number + at * step);
    }
    return -1;
}

void gather_valid(const struct source *sources, int64_t stride, const int32_t *index, int64_t count,
                  uint8_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *valid = sources[index[2 * i] * stride].valid;
        out[i] = valid == NULL || valid[index[2 * i + 1]];
    }
}

typedef int32_t fours __attribute__((vector_size(16)));

#ifdef __clang__
#define PICKED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICKED(a, b, ...) __builtin_shuffle(a, b, (fours){__VA_ARGS__})
#endif

INLINE fours fours_at(const char *from)
{
    fours found;
    memcpy(&found, from, sizeof found);
    return found;
}

INLINE void put_fours(char *to, fours given)
{
    memcpy(to, &given, sizeof given);
}

/* Four runs of four words of 4 bytes: word j of run i becomes word i of run j. */
INLINE void turn_fours(char *const from[4], char *const to[4])
{
    fours a = fours_at(from[0]), b = fours_at(from[1]);
    fours c = fours_at(from[2]), d = fours_at(from[3]);
    fours ab = PICKED(a, b, 0, 4, 1, 5), cd = PICKED(c, d, 0, 4, 1, 5);
    put_fours(to[0], PICKED(ab, cd, 0, 1, 4, 5));
    put_fours(to[1], PICKED(ab, cd, 2, 3, 6, 7));
    ab = PICKED(a, b, 2, 6, 3, 7), cd = PICKED(c, d, 2, 6, 3, 7);
    put_fours(to[2], PICKED(ab, cd, 0, 1, 4, 5));
    put_fours(to[3], PICKED(ab, cd, 2, 3, 6, 7));
}

/* The same of two runs of two words of 8 bytes. */
INLINE void turn_twos(char *const from[2], char *const to[2])
{
    fours a = fours_at(from[0]), b = fours_at(from[1]);
    put_fours(to[0], PICKED(a, b, 0, 1, 4, 5));
    put_fours(to[1], PICKED(a, b, 2, 3, 6, 7));
}

/* How many fields, from the first on, lie side by side and are transposed together: 4, 2 or 1. */
INLINE int64_t turned_together(const struct field *fields, int64_t count)
{
    int64_t bytes = fields->bytes, most = bytes == 4 ? 4 : bytes == 8 ? 2 : 1;
    if (most > count)
        return 1;
    for (int64_t f = 1; f < most; f++)
        if (fields[f].bytes != bytes || fields[f].at != fields->at + f * bytes)
            return 1;
    return most;
}

INLINE void copy_field(char *const *rows, int64_t count, const struct field *field, int64_t first,
                       int64_t bytes, int into_rows)
{
    char *column = field->column + first * bytes;
    for (int64_t i = 0; i < count; i++)
        if (into_rows)
            memcpy(rows[i] + field->at, column + i * bytes, bytes);
        else
            memcpy(column + i * bytes, rows[i] + field->at, bytes);
}

INLINE void copy_any_field(char *const *rows, int64_t count, const struct field *field,
                           int64_t first, int into_rows)
{
    switch (field->bytes) {
    case 1: copy_field(rows, count, field, first, 1, into_rows); return;
    case 2: copy_field(rows, count, field, first, 2, into_rows); return;
    case 4: copy_field(rows, count, field, first, 4, into_rows); return;
    case 8: copy_field(rows, count, field, first, 8, into_rows); return;
    case 16: copy_field(rows, count, field, first, 16, into_rows); return;
    default: copy_field(rows, count, field, first, field->bytes, into_rows);
    }
}

/* The rows from `first` on of the columns, into packed rows or out of them. */
INLINE void turn(char *const *rows, int64_t count, const struct field *fields, int64_t fields_count,
                 int64_t first, int into_rows)
{
    for (int64_t together; fields_count > 0; fields += together, fields_count -= together) {
        int64_t done = 0, at = fields->at;
        together = turned_together(fields, fields_count);
        for (; together == 4 && done + 4 <= count; done += 4) {
            char *const *row = rows + done;
            char *const in_rows[] = {row[0] + at, row[1] + at, row[2] + at, row[3] + at};
            int64_t put = (first + done) * 4;
            char *const in_columns[] = {fields[0].column + put, fields[1].column + put,
                                        fields[2].column + put, fields[3].column + put};
            turn_fours(into_rows ? in_columns : in_rows, into_rows ? in_rows : in_columns);
        }
        for (; together == 2 && done + 2 <= count; done += 2) {
            char *const in_rows[] = {rows[done] + at, rows[done + 1] + at};
            int64_t put = (first + done) * 8;
            char *const in_columns[] = {fields[0].column + put, fields[1].column + put};
            turn_twos(into_rows ? in_columns : in_rows, into_rows ? in_rows : in_columns);
        }
        for (int64_t f = 0; f < together; f++)
            copy_any_field(rows + done, count - done, fields + f, first + done, into_rows);
    }
}

void pack_rows(const struct field *fields, int64_t fields_count, int64_t count, int64_t row_bytes,
               char *out)
{
    char *rows[TILE_ROWS];
    for (int64_t first = 0; first < count; first += TILE_ROWS) {
        int64_t tile = count - first < TILE_ROWS ? count - first : TILE_ROWS;
        for (int64_t i = 0; i < tile; i++)
            rows[i] = out + (first + i) * row_bytes;
        turn(rows, tile, fields, fields_count, first, 1);
    }
}

void gather_packed(const struct source *sources, int64_t stride, const int32_t *index,
                   int64_t count, int64_t row_bytes, const struct field *fields,
                   int64_t fields_count)
{
    char *rows[TILE_ROWS];
    for (int64_t i = 0; i < count && i < TILE_ROWS; i++)
        ask_packed_row(row_at(sources, stride, index, i, row_bytes), row_bytes);
    for (int64_t first = 0; first < count; first += TILE_ROWS) {
        int64_t tile = count - first < TILE_ROWS ? count - first : TILE_ROWS;
        for (int64_t i = first; i < first + tile; i++) {
            rows[i - first] = (char *)row_at(sources, stride, index, i, row_bytes);
            if (i < count - TILE_ROWS)
                ask_packed_row(row_at(sources, stride, index, i + TILE_ROWS, row_bytes), row_bytes);
        }
        turn(rows, tile, fields, fields_count, first, 0);
    }
}

void place_columns(const struct exported *batch, struct placed *out)
{
    for (int64_t at = 0; at < batch->children_count; at++) {
        const struct exported *column = batch->children[at];
        int has_validity = column->buffers_count > 0 && column->buffers[0];
        out[at].length = column->length;
        out[at].null_count = has_validity ? column->null_count : 0;
        out[at].offset = column->offset;
        out[at].values = column->buffers_count > 1 ? column->buffers[1] : NULL;
    }
}

uint32_t gather_source_crc(void)
{
    return SOURCE_CRC;
}
