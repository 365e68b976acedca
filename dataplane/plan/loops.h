/* What loops.py calls, through ctypes. numpy versions are in loops.py. */

#ifndef LOOPS_H
#define LOOPS_H

#include <stdint.h>

#include "../compiler.h"

/*
 * Sorts each row of words; `scratch` has room for one row. Words begin with a hash, so their
 * leading bits nearly tell their places: they are dealt to buckets of about a thousand, then to
 * buckets of a few, and an insertion sort does the rest. Any words are sorted; words that crowd
 * into few buckets take longer.
 */
EXPORT void sort_words(uint64_t *words, int64_t rows, int64_t count, uint64_t *scratch);

/*
 * `first[p]` is the interval of the first of the 2**shift places of part p; one more entry is that
 * of the last place. `starts` are the starts of the intervals and the end of the last one. Every
 * place must be in one of them. With millions of intervals neither table fits into a cache: both
 * are prefetched, so that the cache misses of many places overlap.
 */
EXPORT void find_places(const int64_t *places, int64_t count, const int32_t *first, int64_t shift,
                        const int64_t *starts, int64_t *found, int64_t *within);

/*
 * Numbers the distinct values in rising order: `distinct` has room for all of the values' range,
 * and `seen` is zero for each of them. Returns how many there are.
 */
EXPORT int64_t number_values(const int64_t *values, int64_t count, int64_t lowest, int64_t span,
                             int64_t *seen, int64_t *distinct, int64_t *numbers);

/*
 * Joins records, and the pieces of each record, in order: of record i, piece p is lengths[p][i]
 * bytes of contents[p], from starts[p][i] on.
 */
EXPORT void lay_records(uint8_t *to, int64_t records, int64_t pieces,
                        const uint8_t *const *contents, const int64_t *const *starts,
                        const int64_t *const *lengths);

/*
 * Best fit, decreasing: puts rows into packs of `room`, longest rows first, and rows of equal length
 * in the order `ranked`, or by their number if that is NULL. A row goes to the pack with the least
 * room that is enough for it; of several such packs, to the one that has had that much room the
 * longest; else to a new pack. A pack takes no more than `most` rows. Lengths are at most `room`;
 * rows of length 0 are left out. `placed` gets the rows pack after pack, in the order in which they
 * were put there, and `starts` where each pack begins, and the last one ends; both have room for
 * all rows, `starts` for one more. If `placed` is NULL, packs are only counted. Returns how many
 * there are. `scratch` has room for 4 * count + 4 * room + 64 numbers.
 */
EXPORT int64_t best_fit(const int64_t *lengths, const int64_t *ranked, int64_t count, int64_t room,
                        int64_t most, int64_t *scratch, int64_t *placed, int64_t *starts);

/* Checksum of the sources it was compiled from: loops.py accepts only its own. */
EXPORT uint32_t loops_source_crc(void);

#endif
