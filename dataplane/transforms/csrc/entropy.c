/*
 * Huffman decoding of a sequential JPEG, in the place of libjpeg's own, of only the MCUs that a crop
 * needs; libjpeg does all that comes after it. An MCU is a block of each colour, or a few.
 *
 * What is not needed is stepped over: by restart markers or an index if there are some, else by
 * decoding it to nowhere. One look into a table gives two coefficients, where their codes and the
 * bits behind them are short; libjpeg takes two looks for one. Stuffed zeros are taken out
 * beforehand, so that 8 bytes are read at once.
 *
 * Bits are checked after each MCU: the memory behind a window has room for what one can read.
 *
 * Source: ITU-T T.81, annex C and F.2.
 */

#include <stdlib.h>
#include <string.h>

#include "entropy.h"

enum {
    LOOK_BITS = FAST_BITS,
    EOB_RUN = 128,      /* more than any place in a block, however it adds up */
    BROKEN_RUN = 64,    /* ends a block too, but at a place where no run does */
    PLACES = 64 + 2 * (EOB_RUN + 1),
    /* What an MCU takes at most, of 32 bits a coefficient, and what is read ahead. */
    SLACK_BYTES = D_MAX_BLOCKS_IN_MCU * DCTSIZE2 * 4 + 32,
    IS_PARTIAL = 1 << 15 /* of an entry: the bits behind the code are not in it */
};

/* Where the k-th coefficient lies in a block; behind the last, where a zero does no harm. */
static const uint8_t PLACE_OF[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

static uint8_t places[PLACES];

void entropy_prepare(void)
{
    memset(places, 63, sizeof places);
    memcpy(places, PLACE_OF, sizeof PLACE_OF);
}

/* The value that `count` bits stand for. */
INLINE int extended(uint32_t bits, int count)
{
    return count == 0 ? 0 : bits >> (count - 1) ? (int)bits : (int)bits - (1 << count) + 1;
}

/*
 * An entry: value or symbol << 16 | IS_PARTIAL | run << 6 | bits. A code that is longer than
 * LOOK_BITS has no entry: 0. Runs of 128 fit, since there are 9 bits for them.
 */
INLINE int32_t entry_of(int value, int run, int bits, int flag)
{
    return (int32_t)((uint32_t)value << 16 | (uint32_t)flag | (uint32_t)run << 6 | (uint32_t)bits);
}

/* Returns 0 where these are no codes. */
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
            int symbol = symbols[at], count = symbol & 15, run = symbol >> 4;
            if (is_dc && symbol > 15)
                return 0;
            codes->symbols[at] = (uint8_t)symbol;
            if (length > LOOK_BITS)
                continue;
            int rest = LOOK_BITS - length;
            int32_t *entry = codes->entries + (code << rest);
            if (!is_dc && count == 0 && run < 15)
                run = EOB_RUN;
            for (uint32_t bits = 0; bits < 1u << rest; bits++) {
                if (count > rest)
                    entry[bits] = entry_of(symbol, 0, length, IS_PARTIAL);
                else
                    entry[bits] =
                        entry_of(extended(bits >> (rest - count), count), run, length + count, 0);
            }
        }
        codes->ends[length] = code << (16 - length);
    }
    return 1;
}

/*
 * A pair, from its lowest bit on: 6 bits, how many bits it takes in all; 6, how many the first
 * coefficient takes; 1, whether it is partial; 9, the first one's run; 9, from its place to that of
 * the second; 1, from there to the next; 16 and 16, the values. A pair of one coefficient has a zero
 * at the place behind it, and goes on from there.
 */
enum { PAIR_FIRST = 6, PAIR_PARTIAL = 12, PAIR_RUN = 13, PAIR_STEP = 22, PAIR_ON = 31 };

INLINE uint64_t pair_of_one(int32_t entry)
{
    uint64_t bits = (uint64_t)(entry & 63), run = (uint64_t)(entry >> 6 & 511);
    return bits | bits << PAIR_FIRST | run << PAIR_RUN | 1ull << PAIR_STEP |
           (uint64_t)(uint16_t)(entry >> 16) << 32;
}

static void pairs_fill(struct codes *codes)
{
    for (uint32_t bits = 0; bits < 1u << LOOK_BITS; bits++) {
        int32_t first = codes->entries[bits];
        if (first == 0 || first & IS_PARTIAL) {
            codes->pairs[bits] = 1ull << PAIR_PARTIAL;
            continue;
        }
        uint64_t pair = pair_of_one(first);
        int32_t second = codes->entries[bits << (first & 63) & ((1u << LOOK_BITS) - 1)];
        int both = (first & 63) + (second & 63);
        if (second != 0 && !(second & IS_PARTIAL) && both <= LOOK_BITS &&
            (first >> 6 & 511) != EOB_RUN) {
            pair &= ~(63ull | 511ull << PAIR_STEP);
            pair |= (uint64_t)both | ((uint64_t)(second >> 6 & 511) + 1) << PAIR_STEP |
                    1ull << PAIR_ON | (uint64_t)(uint16_t)(second >> 16) << 48;
        }
        codes->pairs[bits] = pair;
    }
}

static int codes_make(struct codes *codes, const JHUFF_TBL *table, int is_dc)
{
    if (table == NULL)
        return 0;
    /* Most files have the tables of the standard: what was made for the last image is kept. */
    if (codes->is_made && memcmp(codes->bits, table->bits, sizeof codes->bits) == 0 &&
        memcmp(codes->values, table->huffval, sizeof codes->values) == 0)
        return 1;
    codes->is_made = table_fill(codes, table->bits, table->huffval, is_dc);
    if (!is_dc)
        pairs_fill(codes);
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
    reader->next += (63 - reader->count) >> 3;
    reader->count |= 56;
}

INLINE void consume(struct reader *reader, int bits)
{
    reader->word <<= bits;
    reader->count -= bits;
}

/* A code that no entry has whole. Where there is none, 0 bits, and a run that ends the block. */
static int32_t entry_slow(const struct codes *codes, uint64_t word, int32_t entry, int is_dc)
{
    int length = entry & 63, symbol = entry >> 16;
    if (!(entry & IS_PARTIAL)) {
        uint32_t top = (uint32_t)(word >> 48);
        for (length = LOOK_BITS + 1; length <= 16 && top >= codes->ends[length]; length++)
            ;
        if (length > 16)
            return is_dc ? 0 : entry_of(0, BROKEN_RUN, 0, 0);
        symbol = codes->symbols[(int)(top >> (16 - length)) + codes->offsets[length]];
    }
    int count = symbol & 15, run = symbol >> 4;
    uint32_t bits = count == 0 ? 0 : (uint32_t)(word << length >> (64 - count));
    if (!is_dc && count == 0 && run < 15)
        run = EOB_RUN;
    return entry_of(extended(bits, count), run, length + count, 0);
}

/* A word is filled so that the table may be looked into; where it does not know, filled anew. */
INLINE int32_t dc_next(struct reader *reader, const struct codes *codes)
{
    int32_t entry = codes->entries[reader->word >> (64 - LOOK_BITS)];
    if (entry == 0 || entry & IS_PARTIAL)
        entry = entry_slow(codes, reader->word, entry, 1);
    consume(reader, entry & 63);
    return entry;
}

INLINE uint64_t pair_next(struct reader *reader, const struct codes *codes)
{
    uint64_t top = reader->word >> (64 - LOOK_BITS), pair = codes->pairs[top];
    if (__builtin_expect(pair >> PAIR_PARTIAL & 1, 0)) {
        refill(reader);
        pair = pair_of_one(entry_slow(codes, reader->word, codes->entries[top], 0));
        consume(reader, pair & 63);
        refill(reader);
    } else {
        consume(reader, pair & 63);
    }
    return pair;
}

/* Returns 0 where the bits are no block. The block has only zeros before, or is never looked at. */
INLINE int block_read(struct reader *reader, const struct codes *dc, const struct codes *ac,
                      int *last_dc, JCOEF *block)
{
    refill(reader);
    int32_t entry = dc_next(reader, dc);
    if ((entry & 63) == 0)
        return 0;
    *last_dc = (int)((unsigned)*last_dc + (unsigned)(entry >> 16));
    block[0] = (JCOEF)*last_dc;
    for (unsigned k = 1;;) {
        /* A full word has enough for four, of which the table knows all. */
        refill(reader);
        for (int i = 0; i < 4; i++) {
            struct reader before = *reader;
            uint64_t pair = pair_next(reader, ac);
            unsigned first = k + (pair >> PAIR_RUN & 511);
            unsigned second = first + (pair >> PAIR_STEP & 511);
            block[places[first]] = (JCOEF)(pair >> 32);
            block[places[second]] = (JCOEF)(pair >> 48);
            k = second + (pair >> PAIR_ON & 1);
            if (k < 64)
                continue;
            if (first == 63) {
                /* The block ends before the second, whose bits are the next block's. */
                block[63] = (JCOEF)(pair >> 32);
                if (pair >> PAIR_ON & 1) {
                    *reader = before;
                    consume(reader, pair >> PAIR_FIRST & 63);
                }
                return 1;
            }
            return first > 63 ? first > EOB_RUN : second == 63 || second > EOB_RUN;
        }
    }
}

/*
 * Take a part of the scan without stuffed zeros, from a byte on: to the end, or a marker, or until
 * `end`. What lies behind it reads as zeros.
 */
static int window_open(struct entropy *entropy, const struct mark *mark, size_t end)
{
    size_t size = end - mark->offset;
    entropy->window =
        reserved(entropy->window, &entropy->window_bytes, size + SLACK_BYTES);
    if (entropy->window == NULL)
        return 0;
    const uint8_t *from = entropy->scan + mark->offset, *until = entropy->scan + end;
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
    consume(&entropy->reader, mark->bit);
    for (int i = 0; i < MAX_COMPS_IN_SCAN; i++)
        entropy->last_dc[i] = mark->dc[i];
    entropy->mcu_next = mark->mcu;
    return 1;
}

/* Returns 0 where the bits are no MCU, or end within it. `blocks` may be NULL: it is stepped over. */
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

enum entropy_fault entropy_mcu(struct entropy *entropy, JBLOCKROW *blocks)
{
    int64_t mcu = entropy->mcu_asked++;
    int64_t row = mcu / entropy->mcus_per_row, column = mcu % entropy->mcus_per_row;
    if (blocks == NULL || row < entropy->row_first || row > entropy->row_last ||
        column < entropy->column_first || column > entropy->column_last)
        return ENTROPY_FINE;
    if (mcu >= entropy->mcu_covered || entropy->window_end == NULL) {
        /* The last mark that is not behind it; the end of what is needed from there. */
        size_t at = entropy->mark_at;
        while (at + 1 < entropy->mark_count && entropy->marks[at + 1].mcu <= mcu)
            at++;
        int64_t last = row * entropy->mcus_per_row + entropy->column_last;
        size_t next = at + 1;
        while (!entropy->is_restarting && next < entropy->mark_count &&
               entropy->marks[next].mcu <= last)
            next++;
        size_t end = next < entropy->mark_count ? entropy->marks[next].offset + MARK_SLACK
                                                : entropy->scan_bytes;
        end = end > entropy->scan_bytes ? entropy->scan_bytes : end;
        if (!window_open(entropy, entropy->marks + at, end))
            return ENTROPY_NO_MEMORY;
        entropy->mark_at = at;
        entropy->mcu_covered = next < entropy->mark_count ? entropy->marks[next].mcu : INT64_MAX;
    }
    while (entropy->mcu_next < mcu)
        if (!mcu_read(entropy, NULL))
            return ENTROPY_BROKEN;
    return mcu_read(entropy, blocks) ? ENTROPY_FINE : ENTROPY_BROKEN;
}

static void mark_first(struct mark *mark, int64_t mcu, size_t offset)
{
    memset(mark, 0, sizeof *mark);
    mark->mcu = mcu;
    mark->offset = offset;
}

struct mark *entropy_room_for_marks(struct entropy *entropy, size_t count)
{
    entropy->marks =
        reserved(entropy->marks, &entropy->marks_bytes, count * sizeof *entropy->marks);
    entropy->mark_count = 0;
    return entropy->marks;
}

/* Every restart is a mark. Returns 0 where they are not what they should be. */
static int marks_of_restarts(struct entropy *entropy, int64_t interval)
{
    int64_t mcus = entropy->mcus_per_row * entropy->mcu_rows;
    size_t count = (size_t)((mcus + interval - 1) / interval);
    if (entropy_room_for_marks(entropy, count) == NULL)
        return 0;
    mark_first(entropy->marks, 0, 0);
    const uint8_t *scan = entropy->scan, *end = scan + entropy->scan_bytes, *at = scan;
    size_t found = 1;
    while (found < count && (at = memchr(at, 0xff, (size_t)(end - at))) != NULL) {
        while (at < end && *at == 0xff)
            at++;
        if (at == end)
            return 0;
        int marker = *at++;
        if (marker == 0)
            continue;
        if (marker != JPEG_RST0 + (int)((found - 1) % 8))
            return 0;
        mark_first(entropy->marks + found, (int64_t)found * interval, (size_t)(at - scan));
        found++;
    }
    entropy->mark_count = found;
    return found == count;
}

int entropy_begin(struct entropy *entropy, j_decompress_ptr cinfo)
{
    if (cinfo->progressive_mode || cinfo->arith_code || cinfo->data_precision != 8 ||
        cinfo->comps_in_scan != cinfo->num_components || cinfo->blocks_in_MCU > D_MAX_BLOCKS_IN_MCU)
        return 0;
    entropy->scan = cinfo->src->next_input_byte;
    entropy->scan_bytes = cinfo->src->bytes_in_buffer;
    entropy->mcus_per_row = cinfo->MCUs_per_row;
    entropy->mcu_rows = cinfo->MCU_rows_in_scan;
    entropy->mcu_asked = entropy->mcu_next = entropy->mcu_covered = 0;
    entropy->window_end = NULL;
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
    if (entropy_room_for_marks(entropy, 1) == NULL)
        return 0;
    mark_first(entropy->marks, 0, 0);
    entropy->mark_count = 1;
    return 1;
}

/* How many bytes of the scan, stuffed zeros among them, make so many of the window. */
static size_t stuffed_bytes(const uint8_t *scan, size_t from, size_t count)
{
    for (; count > 0; count--)
        if (scan[from++] == 0xff) {
            while (scan[from] == 0xff)
                from++;
            from++;
        }
    return from;
}

size_t entropy_survey(struct entropy *entropy, int64_t step)
{
    int64_t per_row = (entropy->mcus_per_row + step - 1) / step;
    size_t found = 0, known = 0, known_stuffed = 0;
    struct mark first;
    mark_first(&first, 0, 0);
    struct mark *marks = entropy_room_for_marks(entropy, (size_t)(per_row * entropy->mcu_rows));
    if (marks == NULL || !window_open(entropy, &first, entropy->scan_bytes))
        return 0;
    for (int64_t row = 0; row < entropy->mcu_rows; row++)
        for (int64_t column = 0; column < entropy->mcus_per_row; column++) {
            if (column % step == 0) {
                const struct reader *reader = &entropy->reader;
                size_t bits = (size_t)(reader->next - entropy->window) * 8 - (size_t)reader->count;
                known_stuffed = stuffed_bytes(entropy->scan, known_stuffed, bits / 8 - known);
                known = bits / 8;
                struct mark *mark = marks + found++;
                mark_first(mark, entropy->mcu_next, known_stuffed);
                mark->bit = (int)(bits % 8);
                memcpy(mark->dc, entropy->last_dc, sizeof mark->dc);
            }
            if (!mcu_read(entropy, NULL))
                return 0;
        }
    return entropy->mark_count = found;
}

void entropy_free(struct entropy *entropy)
{
    free(entropy->marks);
    free(entropy->window);
}
