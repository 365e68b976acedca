/*
 * The inner loops of a plan, over all of its samples. loops.py describes each function, and has the
 * same ones in numpy.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "loops.h"

enum {
    WORD_BITS = 64,
    NEAR_BITS = 10,      /* about 2**10 words are in a first bucket, in the nearest cache */
    DEALT_BITS_MAX = 12, /* at most 2**12 first buckets */
    INSERTED_MAX = 64,   /* a larger second bucket is sorted in another way */
    WALKED_MAX = 8,      /* in a part with more intervals, a search precedes the walk */
    PARTS_AHEAD = 32,    /* how many places early a part is prefetched, */
    STARTS_AHEAD = 16,   /* and its interval, once the part is cached */
    SET_BITS = 6,        /* a word of a set has 2**6 members */
    SET_LEVELS = 5       /* so a set has at most 2**30 */
};

static int rising(const void *a, const void *b)
{
    uint64_t x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

static int bits_of(uint64_t number)
{
    return number ? WORD_BITS - __builtin_clzll(number) : 0;
}

/* Deals words by the `bits` bits below the first `skipped` ones; ends[b] is where bucket b ends. */
static void deal(const uint64_t *from, uint64_t *to, int64_t count, int skipped, int bits,
                 int64_t *ends)
{
    int shift = WORD_BITS - skipped - bits;
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    memset(ends, 0, sizeof *ends << bits);
    for (int64_t i = 0; i < count; i++)
        ends[from[i] >> shift & mask]++;
    for (int64_t bucket = 0, sum = 0; bucket <= (int64_t)mask; bucket++) {
        int64_t found = ends[bucket];
        ends[bucket] = sum;
        sum += found;
    }
    for (int64_t i = 0; i < count; i++)
        to[ends[from[i] >> shift & mask]++] = from[i];
}

/* Sorts `from` into `to`: words with equal first `skipped` bits. */
static void sort_near(const uint64_t *from, uint64_t *to, int64_t count, int skipped)
{
    if (count < 2) {
        memcpy(to, from, count * sizeof *to);
        return;
    }
    int64_t ends[1 << NEAR_BITS];
    int bits = bits_of(count) - 2; /* a few words each */
    bits = bits < 1 ? 1 : bits > NEAR_BITS ? NEAR_BITS : bits;
    deal(from, to, count, skipped, bits, ends);
    for (int64_t bucket = 0, start = 0; bucket < (int64_t)1 << bits; start = ends[bucket++])
        if (ends[bucket] - start > INSERTED_MAX)
            qsort(to + start, ends[bucket] - start, sizeof *to, rising);
    for (int64_t i = 1; i < count; i++) {
        uint64_t word = to[i];
        int64_t at = i;
        for (; at > 0 && to[at - 1] > word; at--)
            to[at] = to[at - 1];
        to[at] = word;
    }
}

void sort_words(uint64_t *words, int64_t rows, int64_t count, uint64_t *scratch)
{
    int64_t ends[1 << DEALT_BITS_MAX];
    int bits = bits_of(count) - NEAR_BITS;
    bits = bits < 0 ? 0 : bits > DEALT_BITS_MAX ? DEALT_BITS_MAX : bits;
    for (uint64_t *row = words; rows > 0; rows--, row += count) {
        if (!bits) {
            memcpy(scratch, row, count * sizeof *row);
            sort_near(scratch, row, count, 0);
            continue;
        }
        deal(row, scratch, count, 0, bits, ends);
        for (int64_t bucket = 0, start = 0; bucket < (int64_t)1 << bits; start = ends[bucket++])
            sort_near(scratch + start, row + start, ends[bucket] - start, bits);
    }
}

void find_places(const int64_t *places, int64_t count, const int32_t *first, int64_t shift,
                 const int64_t *starts, int64_t *found, int64_t *within)
{
    for (int64_t i = 0; i < count && i < PARTS_AHEAD; i++)
        __builtin_prefetch(first + (places[i] >> shift));
    for (int64_t i = 0; i < count && i < STARTS_AHEAD; i++)
        __builtin_prefetch(starts + first[places[i] >> shift]);
    for (int64_t i = 0; i < count; i++) {
        if (i + PARTS_AHEAD < count)
            __builtin_prefetch(first + (places[i + PARTS_AHEAD] >> shift));
        if (i + STARTS_AHEAD < count)
            __builtin_prefetch(starts + first[places[i + STARTS_AHEAD] >> shift]);
        const int32_t *part = first + (places[i] >> shift);
        int64_t place = places[i], interval = part[0], last = part[1];
        while (last - interval > WALKED_MAX) {
            int64_t middle = interval + (last - interval + 1) / 2;
            if (place < starts[middle])
                last = middle - 1;
            else
                interval = middle;
        }
        /* The first step is unpredictable, so it must not be a jump; few places need another. */
        interval += place >= starts[interval + 1];
        __asm__("" : "+r"(interval));
        while (place >= starts[interval + 1])
            interval++;
        found[i] = interval;
        within[i] = place - starts[interval];
    }
}

int64_t number_values(const int64_t *values, int64_t count, int64_t lowest, int64_t span,
                      int64_t *seen, int64_t *distinct, int64_t *numbers)
{
    int64_t different = 0;
    for (int64_t i = 0; i < count; i++)
        seen[values[i] - lowest] = 1;
    for (int64_t value = 0; value < span; value++)
        if (seen[value]) {
            distinct[different] = lowest + value;
            seen[value] = different++;
        }
    for (int64_t i = 0; i < count; i++)
        numbers[i] = seen[values[i] - lowest];
    return different;
}

void lay_records(uint8_t *to, int64_t records, int64_t pieces, const uint8_t *const *contents,
                 const int64_t *const *starts, const int64_t *const *lengths)
{
    for (int64_t record = 0; record < records; record++)
        for (int64_t piece = 0; piece < pieces; piece++) {
            int64_t length = lengths[piece][record];
            if (length) /* an empty piece may have no address */
                memcpy(to, contents[piece] + starts[piece][record], length);
            to += length;
        }
}

/* A set of small numbers: bit i of a level says whether word i of the level below has any. */
struct set {
    uint64_t *levels[SET_LEVELS];
    int64_t words[SET_LEVELS];
};

static void make_set(struct set *set, int64_t highest, int64_t *memory)
{
    for (int level = 0; level < SET_LEVELS; level++) {
        highest >>= SET_BITS;
        set->levels[level] = (uint64_t *)memory;
        set->words[level] = highest + 1;
        memory += highest + 1;
        memset(set->levels[level], 0, (highest + 1) * sizeof(uint64_t));
    }
}

static void add_member(struct set *set, int64_t member)
{
    for (int level = 0; level < SET_LEVELS; level++, member >>= SET_BITS)
        set->levels[level][member >> SET_BITS] |= (uint64_t)1 << (member & (WORD_BITS - 1));
}

static void remove_member(struct set *set, int64_t member)
{
    for (int level = 0; level < SET_LEVELS; level++, member >>= SET_BITS) {
        uint64_t *word = set->levels[level] + (member >> SET_BITS);
        *word &= ~((uint64_t)1 << (member & (WORD_BITS - 1)));
        if (*word)
            return;
    }
}

/* The smallest member that is `from` or more, or -1. */
static int64_t member_from(const struct set *set, int64_t from)
{
    for (int level = 0; level < SET_LEVELS; level++, from = (from >> SET_BITS) + 1) {
        if (from >> SET_BITS >= set->words[level])
            return -1;
        uint64_t rest = set->levels[level][from >> SET_BITS] >> (from & (WORD_BITS - 1));
        if (!rest)
            continue;
        for (from += __builtin_ctzll(rest); level > 0; level--)
            from = from << SET_BITS | __builtin_ctzll(set->levels[level - 1][from]);
        return from;
    }
    return -1;
}

/* Packs that have the same room, the one that has had it the longest first. */
struct queues {
    struct set rooms; /* those of which there is a pack */
    int64_t *first, *last, *next;
};

static void wait_for_more(struct queues *open, int64_t room, int64_t pack)
{
    if (open->first[room] < 0) {
        open->first[room] = pack;
        add_member(&open->rooms, room);
    } else {
        open->next[open->last[room]] = pack;
    }
    open->last[room] = pack;
    open->next[pack] = -1;
}

static int64_t longest_waiting(struct queues *open, int64_t room)
{
    int64_t pack = open->first[room];
    open->first[room] = open->next[pack];
    if (open->first[room] < 0)
        remove_member(&open->rooms, room);
    return pack;
}

/* Sorts the rows that have a length, longest first; returns how many they are. */
static int64_t by_length(const int64_t *lengths, const int64_t *ranked, int64_t count, int64_t room,
                         int64_t *ends, int64_t *sorted)
{
    int64_t sum = 0;
    memset(ends, 0, (room + 1) * sizeof *ends);
    for (int64_t i = 0; i < count; i++)
        ends[lengths[i]]++;
    for (int64_t length = room; length > 0; length--) {
        int64_t found = ends[length];
        ends[length] = sum;
        sum += found;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t row = ranked ? ranked[i] : i;
        if (lengths[row])
            sorted[ends[lengths[row]]++] = row;
    }
    return sum;
}

int64_t best_fit(const int64_t *lengths, const int64_t *ranked, int64_t count, int64_t room,
                 int64_t most, int64_t *scratch, int64_t *placed, int64_t *starts)
{
    int64_t *sorted = scratch, *pack_of = sorted + count, *taken = pack_of + count;
    struct queues open = {.next = taken + count, .first = taken + 2 * count};
    open.last = open.first + room + 1;
    int64_t *ends = open.last + room + 1, packs = 0;
    make_set(&open.rooms, room, ends + room + 1);
    for (int64_t i = 0; i <= room; i++)
        open.first[i] = -1;
    count = by_length(lengths, ranked, count, room, ends, sorted);
    for (int64_t i = 0; i < count; i++) {
        int64_t length = lengths[sorted[i]], found = member_from(&open.rooms, length);
        int64_t pack = found < 0 ? packs++ : longest_waiting(&open, found);
        taken[pack] = found < 0 ? 1 : taken[pack] + 1;
        pack_of[i] = pack;
        int64_t left = (found < 0 ? room : found) - length;
        if (left && taken[pack] < most)
            wait_for_more(&open, left, pack);
    }
    if (!placed)
        return packs;
    starts[0] = 0;
    for (int64_t pack = 0; pack < packs; pack++) {
        starts[pack + 1] = starts[pack] + taken[pack];
        taken[pack] = starts[pack];
    }
    for (int64_t i = 0; i < count; i++)
        placed[taken[pack_of[i]]++] = sorted[i];
    return packs;
}

uint32_t loops_source_crc(void)
{
    return SOURCE_CRC;
}
