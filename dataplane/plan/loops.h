/* What loops.py calls, through ctypes. It has the same in numpy. */

#ifndef LOOPS_H
#define LOOPS_H

#include <stdint.h>

#include "../compiler.h"

/*
 * Each row of words by itself; `scratch` has room for one. Words begin with a hash, so that their
 * leading bits say nearly where each of them goes: they are dealt to buckets of about a thousand,
 * then to buckets of a few, and what is left is put right by insertion. Any words are sorted; those
 * that crowd into few buckets take longer.
 */
EXPORT void sort_words(uint64_t *words, int64_t rows, int64_t count, uint64_t *scratch);

/*
 * `first[p]` is the interval of the first of the 2**shift places of part p, and one more entry is
 * that of the last place; `starts` are those of the intervals and where the last one ends. Every
 * place must be in one of them. Of millions of intervals neither table fits into a cache: both are
 * asked for before they are needed, so that the waits of many places pass at the same time.
 */
EXPORT void find_places(const int64_t *places, int64_t count, const int32_t *first, int64_t shift,
                        const int64_t *starts, int64_t *found, int64_t *within);

/*
 * Numbers the distinct values in rising order: `distinct` has room for as many as the values span,
 * and `seen` is zero for each of them. Returns how many there are.
 */
EXPORT int64_t number_values(const int64_t *values, int64_t count, int64_t lowest, int64_t span,
                             int64_t *seen, int64_t *distinct, int64_t *numbers);

/*
 * One record after another, of each record one piece after another: of record i, piece p is
 * lengths[p][i] bytes of contents[p], from starts[p][i] on.
 */
EXPORT void lay_records(uint8_t *to, int64_t records, int64_t pieces,
                        const uint8_t *const *contents, const int64_t *const *starts,
                        const int64_t *const *lengths);

/* Of the sources that this was made from: loops.py takes no other's. */
EXPORT uint32_t loops_source_crc(void);

#endif
