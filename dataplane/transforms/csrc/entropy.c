/*
 * Huffman decoding of a sequential JPEG, in place of libjpeg's, of only the MCUs for a crop;
 * libjpeg does everything after it. An MCU is one or a few blocks of each colour.
 *
 * MCUs that are not needed are skipped by restart markers or a restart index (restart_index.c) if
 * there are some, else decoded and dropped. One table look-up gives a code's length, its run, and
 * the number of bits that follow; their value is computed without a branch, since a mispredicted
 * branch costs more than all the rest. Stuffed zeros are removed first, so that 8 bytes are read at once.
 *
 * Bits are checked after each MCU: the memory behind a window has room for one MCU's reads.
 *
 * Source: ITU-T T.81, annex C and F.2.
 */

#include <stdlib.h>
#include <string.h>

#ifndef WITHOUT_LIBJPEG

#include "../../compiler.h"
#include "entropy.h"
#include "memory.h"

enum {
    LOOK_BITS = FAST_BITS,
    EOB_RUN = 128,      /* beyond any place in a block, after any sum */
    BROKEN_RUN = 64, /* also ends a block, at a place that no run reaches */
    PLACES = 64 + EOB_RUN + 1,
    DC_BITS_MAX = 11,
    AC_BITS_MAX = 10,
    MARK_SLACK = 16, /* bytes behind a mark, within which the MCU before it has ended */
    /* The most that an MCU takes, at 32 bits a coefficient, and the bytes read ahead. */
    SLACK_BYTES = D_MAX_BLOCKS_IN_MCU * DCTSIZE2 * 4 + 32
};

/* The place of the k-th coefficient in a block; behind the last one, where a zero is harmless. */
static const uint8_t PLACE_OF[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

static uint8_t places[PLACES];

_Static_assert(COMPONENTS_MAX == MAX_COMPS_IN_SCAN, "as many as libjpeg has");

void entropy_prepare(void)
{
    memset(places, 63, sizeof places);
    memcpy(places, PLACE_OF, sizeof PLACE_OF);
}

/*
 * An entry has four fields of 8 bits, from its lowest bit on: the bits of code and value together;
 * of the code; of the value; the run before the coefficient. 0: the code exceeds LOOK_BITS.
 */
INLINE uint32_t entry_of(int symbol, int length, int is_dc)
{
    int count = symbol & 15, run = symbol >> 4;
    if (!is_dc && count == 0 && run < 15)
        run = EOB_RUN;
    return (uint32_t)run << 24 | (uint32_t)count << 16 | (uint32_t)length << 8 |
           (uint32_t)(length + count);
}

/* Returns 0 if these are not codes, or have more value bits than 8 bits a channel can need. */
static int table_fill(struct codes *codes, const uint8_t *counts, const uint8_t *symbols,
                      int is_dc)
{
    uint32_t code = 0;
    int at = 0;
    memset(codes->entries, 0, sizeof codes->entries);
    for (int length = 1; length <= 16; length++, code <<= 1) {
        codes->offsets[length] = at - (int)code;
        for (int i = 0; i < counts[length]; i++, code++, at++) {
            if (at >= 256 || code >= 1u << length)
                return 0;
            int symbol = symbols[at];
            if (is_dc ? symbol > DC_BITS_MAX : (symbol & 15) > AC_BITS_MAX)
                return 0;
            codes->symbols[at] = (uint8_t)symbol;
            for (int rest = LOOK_BITS - length, bits = 0; rest >= 0 && bits < 1 << rest; bits++)
                codes->entries[((int)code << rest) + bits] = entry_of(symbol, length, is_dc);
        }
        codes->ends[length] = code << (16 - length);
    }
    return 1;
}

static int codes_make(struct codes *codes, const JHUFF_TBL *table, int is_dc)
{
    if (table == NULL)
        return 0;
    /* Most files have the standard tables: those built for the last image are kept. */
    if (codes->is_made && memcmp(codes->bits, table->bits, sizeof codes->bits) == 0 &&
        memcmp(codes->values, table->huffval, sizeof codes->values) == 0)
        return 1;
    codes->is_made = table_fill(codes, table->bits, table->huffval, is_dc);
    memcpy(codes->bits, table->bits, sizeof codes->bits);
    memcpy(codes->values, table->huffval, sizeof codes->values);
    return codes->is_made;
}

INLINE void refill(struct reader *reader)
{
    uint64_t more;
    memcpy(&more, reader->next, sizeof more);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    more = __builtin_bswap64(more);
#endif
    reader->word |= more >> reader->count;
    reader->next += (reader->count ^ 63) >> 3;
    reader->count |= 56;
}

INLINE void consume(struct reader *reader, uint32_t bits)
{
    reader->word <<= bits;
    reader->count -= bits;
}

/* The entry of a code longer than LOOK_BITS; if invalid, no bits and a run past the block. */
static uint32_t entry_slow(const struct codes *codes, uint64_t word, int is_dc)
{
    uint32_t top = (uint32_t)(word >> 48);
    int length = LOOK_BITS + 1;
    while (length <= 16 && top >= codes->ends[length])
        length++;
    if (length > 16)
        return (uint32_t)BROKEN_RUN << 24;
    return entry_of(codes->symbols[(int)(top >> (16 - length)) + codes->offsets[length]], length,
                    is_dc);
}

INLINE uint32_t entry_at(const struct codes *codes, uint64_t word, int is_dc)
{
    uint32_t entry = codes->entries[word >> (64 - LOOK_BITS)];
    if (__builtin_expect(entry == 0, 0))
        entry = entry_slow(codes, word, is_dc);
    return entry;
}

/* The value behind the code: `count` bits, which stand for a negative one if the first is 0. */
INLINE int value_at(uint32_t entry, uint64_t word)
{
    uint64_t from = word << (entry >> 8 & 63);
    int count = entry >> 16 & 63;
    int bits = (int)(from >> 1 >> (63 - count)), is_negative = (int)(~from >> 63);
    return bits - (-is_negative & ((1 << count) - 1));
}

/* Returns 0 if the bits are not a block. The block is all zeros before, or is never read. */
INLINE int block_read(struct reader *reader, const struct codes *dc, const struct codes *ac,
                      int *last_dc, JCOEF *block)
{
    refill(reader);
    uint32_t entry = entry_at(dc, reader->word, 1);
    if ((entry & 63) == 0)
        return 0;
    *last_dc = (int)((unsigned)*last_dc + (unsigned)value_at(entry, reader->word));
    block[0] = (JCOEF)*last_dc;
    consume(reader, entry & 63);
    for (unsigned k = 1;;) {
        uint64_t word = reader->word;
        entry = entry_at(ac, word, 0);
        /* The look-up does not wait for the new bits: at least 29 were left. */
        refill(reader);
        k += entry >> 24;
        block[places[k]] = (JCOEF)value_at(entry, word);
        consume(reader, entry & 63);
        if (++k >= 64)
            return k == 64 || k > EOB_RUN;
    }
}

/*
 * Take a part of the scan without stuffed zeros, from a byte on: to the end, or a marker, or until
 * `end`. The bytes behind it read as zeros.
 */
static int window_open(struct entropy *entropy, const struct mark *mark, size_t end)
{
    size_t size = end - mark->offset;
    entropy->window =
        reserved(entropy->window, &entropy->window_bytes, size + SLACK_BYTES);
    if (entropy->window == NULL)
        return 0;
    const uint8_t *from = entropy->scan.bytes + mark->offset, *until = entropy->scan.bytes + end;
    uint8_t *to = entropy->window;
    while (from < until) {
        const uint8_t *stuffed = memchr(from, 0xff, (size_t)(until - from));
        size_t plain = (size_t)((stuffed == NULL ? until : stuffed) - from);
        memcpy(to, from, plain);
        to += plain;
        if (stuffed == NULL)
            break;
        from = stuffed + 1;
        while (from < until && *from == 0xff)
            from++;
        if (from < until && *from != 0)
            break;
        *to++ = 0xff;
        from++;
    }
    memset(to, 0, SLACK_BYTES);
    entropy->window_end = to;
    entropy->reader = (struct reader){0, 0, entropy->window};
    refill(&entropy->reader);
    consume(&entropy->reader, (uint32_t)mark->bit);
    for (int i = 0; i < MAX_COMPS_IN_SCAN; i++)
        entropy->last_dc[i] = mark->dc[i];
    entropy->mcu_next = mark->mcu;
    entropy->passed = 0;
    entropy->passed_stuffed = mark->offset;
    return 1;
}

/* Returns 0 if the bits are not an MCU, or end within it. `blocks` is NULL to skip the MCU. */
FOR_EACH_PROCESSOR
static int mcu_read(struct entropy *entropy, JBLOCKROW *blocks)
{
    struct reader reader = entropy->reader;
    for (int i = 0; i < entropy->block_count; i++) {
        const struct block_plan *plan = entropy->blocks + i;
        if (!block_read(&reader, plan->dc, plan->ac, entropy->last_dc + plan->component,
                        blocks == NULL ? entropy->nowhere : *blocks[i]))
            return 0;
    }
    entropy->reader = reader;
    entropy->mcu_next++;
    /* Bytes in the word are read, but not used. */
    return reader.next - reader.count / 8 <= entropy->window_end;
}

/* The number of bytes of the scan, with stuffed zeros, that become this many of the window. */
static size_t stuffed_bytes(const uint8_t *scan, size_t end, size_t from, size_t count)
{
    while (count > 0 && from < end) {
        const uint8_t *stuffed = memchr(scan + from, 0xff, count < end - from ? count : end - from);
        if (stuffed == NULL)
            return from + count < end ? from + count : end;
        size_t after = (size_t)(stuffed - scan) + 1;
        count -= after - from;
        from = after;
        while (from < end && scan[from] == 0xff)
            from++;
        from++;
    }
    return from < end ? from : end;
}

static void mark_note(struct entropy *entropy)
{
    const struct reader *reader = &entropy->reader;
    size_t bits = (size_t)(reader->next - entropy->window) * 8 - reader->count;
    entropy->passed_stuffed = stuffed_bytes(entropy->scan.bytes, entropy->scan.length,
                                            entropy->passed_stuffed, bits / 8 - entropy->passed);
    entropy->passed = bits / 8;
    struct mark mark = {.offset = entropy->passed_stuffed, .bit = (int)(bits % 8)};
    memcpy(mark.dc, entropy->last_dc, sizeof mark.dc);
    restart_index_note(&entropy->noting, &mark);
}

/* As mcu_read; notes a mark if one is due. */
INLINE int mcu_pass(struct entropy *entropy, JBLOCKROW *blocks)
{
    if (__builtin_expect(entropy->mcu_next == entropy->noting.due, 0))
        mark_note(entropy);
    return mcu_read(entropy, blocks);
}

enum entropy_fault entropy_mcu(struct entropy *entropy, JBLOCKROW *blocks)
{
    const struct scan *scan = &entropy->scan;
    const struct marks *marks = &entropy->marks;
    int64_t mcu = entropy->mcu_asked++;
    int64_t row = mcu / scan->mcus_per_row, column = mcu % scan->mcus_per_row;
    if (blocks == NULL || row < scan->row_first || row > scan->row_last ||
        column < scan->column_first || column > scan->column_last)
        return ENTROPY_FINE;
    if (mcu >= entropy->mcu_covered || entropy->window_end == NULL) {
        /* There was no memory for a restart index's marks. */
        if (marks->count == 0)
            return ENTROPY_NO_MEMORY;
        /* The last mark at or before it; the end of the MCUs needed from there. */
        size_t at = entropy->mark_at;
        while (at + 1 < marks->count && marks->all[at + 1].mcu <= mcu)
            at++;
        int64_t last = row * scan->mcus_per_row + scan->column_last;
        size_t next = at + 1;
        while (!entropy->is_restarting && next < marks->count && marks->all[next].mcu <= last)
            next++;
        size_t end = next < marks->count ? marks->all[next].offset + MARK_SLACK : scan->length;
        end = end > scan->length ? scan->length : end;
        if (!window_open(entropy, marks->all + at, end))
            return ENTROPY_NO_MEMORY;
        entropy->mark_at = at;
        entropy->mcu_covered = next < marks->count ? marks->all[next].mcu : INT64_MAX;
    }
    while (entropy->mcu_next < mcu)
        if (!mcu_pass(entropy, NULL))
            return ENTROPY_BROKEN;
    return mcu_pass(entropy, blocks) ? ENTROPY_FINE : ENTROPY_BROKEN;
}

/* Every restart marker becomes a mark. Returns 0 if the markers are invalid. */
static int marks_of_restarts(struct entropy *entropy, int64_t interval)
{
    struct marks *marks = &entropy->marks;
    int64_t mcus = entropy->scan.mcus_per_row * entropy->scan.mcu_rows;
    size_t count = (size_t)((mcus + interval - 1) / interval);
    if (!marks_begin(marks, count))
        return 0;
    marks_add(marks, 0, 0);
    const uint8_t *scan = entropy->scan.bytes, *end = scan + entropy->scan.length, *at = scan;
    while (marks->count < count && (at = memchr(at, 0xff, (size_t)(end - at))) != NULL) {
        while (at < end && *at == 0xff)
            at++;
        if (at == end)
            return 0;
        int marker = *at++;
        if (marker == 0)
            continue;
        if (marker != JPEG_RST0 + (int)((marks->count - 1) % 8))
            return 0;
        marks_add(marks, (int64_t)marks->count * interval, (size_t)(at - scan));
    }
    return marks->count == count;
}

int entropy_begin(struct entropy *entropy, j_decompress_ptr cinfo)
{
    if (cinfo->progressive_mode || cinfo->arith_code || cinfo->data_precision != 8 ||
        cinfo->comps_in_scan != cinfo->num_components || cinfo->blocks_in_MCU > D_MAX_BLOCKS_IN_MCU)
        return 0;
    entropy->scan = (struct scan){.bytes = cinfo->src->next_input_byte,
                                  .length = cinfo->src->bytes_in_buffer,
                                  .mcus_per_row = cinfo->MCUs_per_row,
                                  .mcu_rows = cinfo->MCU_rows_in_scan};
    entropy->mcu_asked = entropy->mcu_next = entropy->mcu_covered = 0;
    entropy->window_end = NULL;
    restart_index_none(&entropy->noting);
    entropy->block_count = cinfo->blocks_in_MCU;
    for (int i = 0; i < cinfo->blocks_in_MCU; i++) {
        int component = cinfo->MCU_membership[i];
        const jpeg_component_info *info = cinfo->cur_comp_info[component];
        struct codes *dc = entropy->dc_codes + info->dc_tbl_no;
        struct codes *ac = entropy->ac_codes + info->ac_tbl_no;
        if (!codes_make(dc, cinfo->dc_huff_tbl_ptrs[info->dc_tbl_no], 1) ||
            !codes_make(ac, cinfo->ac_huff_tbl_ptrs[info->ac_tbl_no], 0))
            return 0;
        entropy->blocks[i] = (struct block_plan){dc, ac, component};
    }
    entropy->mark_at = 0;
    entropy->is_restarting = cinfo->restart_interval != 0;
    if (entropy->is_restarting)
        return marks_of_restarts(entropy, cinfo->restart_interval);
    if (!marks_begin(&entropy->marks, 1))
        return 0;
    marks_add(&entropy->marks, 0, 0);
    return 1;
}

void entropy_follow(struct entropy *entropy, int components, int mcu_width,
                    const struct restart_index *restart_index)
{
    if (!entropy->is_restarting)
        restart_index_follow(&entropy->noting, &entropy->marks, &entropy->scan, components,
                             mcu_width, restart_index);
}

void entropy_forget(struct entropy *entropy)
{
    entropy->noting.noted = entropy->noting.known = 0;
}

void entropy_leave(const struct entropy *entropy)
{
    restart_index_leave(&entropy->noting);
}

void entropy_free(struct entropy *entropy)
{
    marks_free(&entropy->marks);
    free(entropy->window);
}

#endif
