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
    AHEAD_PIECES = 2,    /* in pieces of packs */
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

#define WIDENED(type, wide)                                                                        \
    for (int64_t i = 0; i < count; i++) {                                                          \
        type number;                                                                               \
        memcpy(&number, from + i * (int64_t)sizeof number, sizeof number);                         \
        ((wide *)out)[i] = (wide)number;                                                           \
    }                                                                                              \
    return

/* Integers of element_bytes as those of out_bytes, which has them all. */
INLINE void widen(const char *from, int64_t count, int64_t element_bytes, int64_t is_signed,
                  int64_t out_bytes, void *out)
{
    int64_t kind = is_signed ? -element_bytes : element_bytes;
    if (element_bytes == out_bytes) {
        if (count > 0)
            memcpy(out, from, count * element_bytes);
        return;
    }
    switch (out_bytes == 4 ? 16 * kind : kind) {
    case -1: WIDENED(int8_t, int64_t);
    case -2: WIDENED(int16_t, int64_t);
    case -4: WIDENED(int32_t, int64_t);
    case 1: WIDENED(uint8_t, int64_t);
    case 2: WIDENED(uint16_t, int64_t);
    case 4: WIDENED(uint32_t, int64_t);
    case -16: WIDENED(int8_t, int32_t);
    case -32: WIDENED(int16_t, int32_t);
    case 16: WIDENED(uint8_t, int32_t);
    case 32: WIDENED(uint16_t, int32_t);
    default: return;
    }
}

/* One piece of a document: its row, its first token, its tokens, and its place in the pack. */
struct piece {
    int64_t row;
    int64_t begin;
    int64_t length;
    int64_t place;
    int64_t taken; /* by its document in the pack: its length, rounded up */
    int64_t room;  /* up to the next piece, or to the end of the pack */
};

INLINE struct piece piece_at(const struct packs *packs, int64_t at, int64_t end,
                             const struct packing *packing)
{
    const int32_t *found = packs->pieces + at;
    int64_t all = packs->pieces_count;
    struct piece piece = {found[0], found[all], found[2 * all], found[3 * all], 0, 0};
    int64_t next = at + 1 < end ? found[3 * all + 1] : packing->length;
    piece.room = next - piece.place;
    piece.taken = at + 1 < end ? piece.room
                               : (piece.length + packing->multiple - 1) / packing->multiple *
                                     packing->multiple;
    return piece;
}

/* Whether these are pieces of documents of the block, one behind the other in their pack. */
static int are_pieces(const struct packs *packs, int64_t start, int64_t end,
                      const struct packing *packing)
{
    if (!is_within(start, end - start, packs->pieces_count) || start == end ||
        end - start > packing->cuts - 2)
        return 0;
    for (int64_t at = start; at < end; at++) {
        struct piece piece = piece_at(packs, at, end, packing);
        if (piece.row < 0 || piece.row >= packs->rows || piece.begin < 0 || piece.length < 0 ||
            piece.length > piece.taken || piece.taken > piece.room ||
            !is_within(piece.place, piece.room, packing->length) || (at == start && piece.place))
            return 0;
    }
    return 1;
}

/* Where the tokens of a piece begin, and how many its document has from there on; or -1. */
INLINE int64_t tokens_of(const struct source *source, const struct piece *piece, int64_t *left)
{
    int64_t start = start_at(source, piece->row), end = start_at(source, piece->row + 1);
    if (!is_within(start, end - start, source->count) || piece->begin > end - start)
        return -1;
    *left = end - start - piece->begin;
    return start + piece->begin;
}

INLINE void fill(int32_t *out, int64_t count, int32_t first, int32_t step)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = first + (int32_t)i * step;
}

/* The first lines of a piece that is copied later; it is checked in its turn. */
INLINE void ask_piece(const struct packs *packs, int64_t at, int64_t end,
                      const struct packing *packing)
{
    struct piece piece = piece_at(packs, at, end, packing);
    if (piece.row < 0 || piece.row >= packs->rows)
        return;
    const struct source *source = packs->sources + packing->columns->source;
    ask_run(source, start_at(source, piece.row) + piece.begin, piece.length,
            packing->columns->element_bytes);
}

/* Those of the first pieces of a pack. */
INLINE void ask_first(const struct packs *packs, const int32_t *starts,
                      const struct packing *packing)
{
    if (!is_within(starts[0], (int64_t)starts[1] - starts[0], packs->pieces_count))
        return;
    for (int64_t at = starts[0]; at < starts[1] && at < starts[0] + AHEAD_PIECES; at++)
        ask_piece(packs, at, starts[1], packing);
}

INLINE int copy_tokens(const struct packs *packs, int64_t start, int64_t end,
                       const struct packing *packing, const struct pack_column *column, char *out)
{
    const struct source *source = packs->sources + column->source;
    int64_t width = column->element_bytes, wide = column->out_bytes, left;
    for (int64_t at = start; at < end; at++) {
        if (at + AHEAD_PIECES < end)
            ask_piece(packs, at + AHEAD_PIECES, end, packing);
        struct piece piece = piece_at(packs, at, end, packing);
        int64_t from = tokens_of(source, &piece, &left);
        if (from < 0 || piece.length > left)
            return 0;
        char *to = out + piece.place * wide;
        widen(source->values + from * width, piece.length, width, column->is_signed, wide, to);
        pad(to + piece.length * wide, (piece.room - piece.length) * wide,
            (const char *)&column->padding, wide);
    }
    return 1;
}

/* The labels of a piece have no loss where the mask of their token, the next one, is 0. */
INLINE int mask_labels(const struct packs *packs, const struct piece *piece,
                       const struct pack_column *column, int64_t count, int64_t *labels)
{
    const struct source *source = packs->sources + column->mask;
    int64_t left, from = tokens_of(source, piece, &left);
    if (from < 0 || count >= left)
        return 0;
    const char *values = source->values + (from + 1) * column->mask_bytes;
    for (int64_t i = 0; i < count; i++) {
        char any = 0;
        for (int64_t byte = 0; byte < column->mask_bytes; byte++)
            any |= values[i * column->mask_bytes + byte];
        if (!any)
            labels[i] = column->padding;
    }
    return 1;
}

/* The token after the last one of a document that is cut is its label, too. */
INLINE int copy_labels(const struct packs *packs, int64_t start, int64_t end,
                       const struct packing *packing, const struct pack_column *column,
                       int64_t *out)
{
    const struct source *source = packs->sources + column->source;
    int64_t width = column->element_bytes, left;
    for (int64_t at = start; at < end; at++) {
        struct piece piece = piece_at(packs, at, end, packing);
        int64_t from = tokens_of(source, &piece, &left);
        if (from < 0 || piece.length > left)
            return 0;
        int64_t count = piece.length < left ? piece.length : left - 1;
        if (count > 0)
            widen(source->values + (from + 1) * width, count, width, column->is_signed,
                  (int64_t)sizeof *out, out + piece.place);
        if (count > 0 && column->mask >= 0 &&
            !mask_labels(packs, &piece, column, count, out + piece.place))
            return 0;
        for (int64_t i = count > 0 ? count : 0; i < piece.room; i++)
            out[piece.place + i] = column->padding;
    }
    return 1;
}

/* Where documents lie in their pack: what a column of this kind says of it. */
INLINE void say_where(const struct packs *packs, int64_t start, int64_t end,
                      const struct packing *packing, int64_t kind, int32_t *out)
{
    int64_t used = 0, longest = 0;
    for (int64_t at = start; at < end; at++) {
        struct piece piece = piece_at(packs, at, end, packing);
        used = piece.place + piece.taken;
        longest = piece.taken > longest ? piece.taken : longest;
        if (kind == POSITIONS)
            fill(out + piece.place, piece.taken, 0, 1);
        else if (kind == DOCUMENTS)
            fill(out + piece.place, piece.taken, (int32_t)(at - start), 0);
        else if (kind == CUTS)
            out[at - start] = (int32_t)piece.place;
        else if (kind == LENGTHS)
            out[at - start] = (int32_t)piece.length;
    }
    int64_t rest = packing->length - used;
    if (kind == POSITIONS)
        fill(out + used, rest, 0, 1);
    else if (kind == DOCUMENTS)
        fill(out + used, rest, -1, 0);
    else if (kind == CUTS) {
        out[end - start] = (int32_t)used;
        fill(out + (end - start) + 1, packing->cuts - (end - start) - 1, (int32_t)packing->length,
             0);
    } else if (kind == LENGTHS)
        fill(out + (end - start), packing->cuts - 2 - (end - start), 0, 0);
    else
        *out = (int32_t)(longest > rest ? longest : rest);
}

INLINE int write_pack(const struct packs *packs, int64_t start, int64_t end,
                      const struct packing *packing, int64_t row)
{
    if (!are_pieces(packs, start, end, packing))
        return 0;
    for (const struct pack_column *column = packing->columns;
         column < packing->columns + packing->columns_count; column++) {
        char *out = column->out + row * column->row_bytes;
        int is_written = 1;
        if (column->kind == TOKENS)
            is_written = copy_tokens(packs, start, end, packing, column, out);
        else if (column->kind == LABELS)
            is_written = copy_labels(packs, start, end, packing, column, (int64_t *)(void *)out);
        else
            say_where(packs, start, end, packing, column->kind, (int32_t *)(void *)out);
        if (!is_written)
            return 0;
    }
    return 1;
}

/* A pack of the index: its table, and where in it its first piece is; or NULL if there is none. */
INLINE const struct packs *pack_at(const struct packing *packing, const int32_t *index,
                                   const int32_t **starts)
{
    int64_t block = index[0], row = index[1];
    if (block < 0 || block >= packing->blocks || row < 0)
        return NULL;
    int64_t table = packing->tables[block] + (row >> PACK_BITS);
    int64_t number = row & ((1 << PACK_BITS) - 1);
    if (table >= packing->tables[block + 1] || number >= packing->packs[table].count)
        return NULL;
    *starts = packing->packs[table].starts + number;
    return packing->packs + table;
}

FOR_EACH_PROCESSOR
static int64_t write_packs(const struct packing *packing, const int32_t *index,
                           const int64_t *rows, int64_t count)
{
    const int32_t *starts, *later_starts;
    for (int64_t i = 0; i < count; i++) {
        const struct packs *packs = pack_at(packing, index + 2 * i, &starts);
        if (packs == NULL)
            return i;
        if (i + 1 < count) {
            const struct packs *later = pack_at(packing, index + 2 * (i + 1), &later_starts);
            if (later != NULL)
                ask_first(later, later_starts, packing);
        }
        if (!write_pack(packs, starts[0], starts[1], packing, rows[i]))
            return i;
    }
    return -1;
}

int64_t gather_packs(const struct packing *packing, const int32_t *index, const int64_t *rows,
                     int64_t count)
{
    return write_packs(packing, index, rows, count);
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
