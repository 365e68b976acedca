/*
 * The trail of an image: where decoding can start within its scan, noted in memory that the caller
 * keeps by those who decode a crop, for those who decode another crop of the same image later.
 *
 *   how many marks there are                                     uint32, written last
 *   each mark: byte, uint32; bit, uint8; then of each component the DC so far, int16
 *
 * Numbers but the first begin with their lowest byte. New memory is zero. There is a mark every
 * `step` MCUs of a row, and the image and the room alone decide on the step: whoever notes a mark
 * writes the same bytes as anybody else would, so that several processes may note and use them at
 * once, and be killed at it. A count that falls back forgets marks, which are noted again.
 *
 * All before a mark was decoded without a fault, so stepping over it hides none. Should the memory
 * hold something else after all, wrong pixels come of that, but nothing is read beyond the scan.
 */

#include <string.h>

#include "trail.h"

enum {
    HEAD_BYTES = 8,
    STEP_PIXELS = 32 /* a row of MCUs has a mark about every so many, if there is room */
};

INLINE void put(uint8_t *at, uint32_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

INLINE uint32_t get(const uint8_t *at, int bytes)
{
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint32_t)at[i] << 8 * i;
    return value;
}

static uint8_t *place_of(const struct noting *noting, int64_t mark)
{
    return noting->bytes + HEAD_BYTES + mark * noting->mark_bytes;
}

static int64_t mcu_of(const struct entropy *entropy, int64_t mark)
{
    const struct noting *noting = &entropy->noting;
    return mark / noting->per_row * entropy->mcus_per_row + mark % noting->per_row * noting->step;
}

/* Returns 0 where there is no room for a mark in every row. */
static int choose_step(struct entropy *entropy, int components, int mcu_width,
                       const struct trail *trail)
{
    struct noting *noting = &entropy->noting;
    int64_t columns = entropy->mcus_per_row, step = (STEP_PIXELS + mcu_width - 1) / mcu_width;
    noting->mark_bytes = 5 + 2 * components;
    int64_t room = (trail->length - HEAD_BYTES) / noting->mark_bytes;
    while (step < columns && entropy->mcu_rows * ((columns + step - 1) / step) > room)
        step *= 2;
    noting->bytes = trail->bytes;
    noting->components = components;
    noting->step = step;
    noting->per_row = (columns + step - 1) / step;
    noting->all = entropy->mcu_rows * noting->per_row;
    return noting->all <= room;
}

/* Returns 0 where these are no marks of this scan. */
static int marks_read(struct entropy *entropy, int64_t first, int64_t end)
{
    struct mark *marks = entropy_room_for_marks(entropy, (size_t)(end - first) + 1);
    if (marks == NULL)
        return 0;
    memset(marks, 0, sizeof *marks);
    entropy->mark_count = 1;
    for (int64_t i = first; i < end; i++) {
        const uint8_t *at = place_of(&entropy->noting, i);
        struct mark *mark = marks + entropy->mark_count;
        memset(mark, 0, sizeof *mark);
        mark->mcu = mcu_of(entropy, i);
        mark->offset = get(at, 4);
        mark->bit = at[4] & 7;
        for (int c = 0; c < entropy->noting.components; c++)
            mark->dc[c] = (int16_t)get(at + 5 + 2 * c, 2);
        if (mark->offset < mark[-1].offset || mark->offset >= entropy->scan_bytes) {
            entropy->mark_count = 1;
            return 0;
        }
        entropy->mark_count++;
    }
    return 1;
}

void trail_follow(struct entropy *entropy, int components, int mcu_width,
                  const struct trail *trail)
{
    struct noting *noting = &entropy->noting;
    if (trail->bytes == NULL || trail->length < HEAD_BYTES ||
        (uintptr_t)trail->bytes % sizeof(uint32_t) != 0 || entropy->is_restarting ||
        entropy->scan_bytes > UINT32_MAX || !choose_step(entropy, components, mcu_width, trail))
        return;
    noting->known = __atomic_load_n((const uint32_t *)(const void *)noting->bytes,
                                    __ATOMIC_ACQUIRE);
    if (noting->known > noting->all)
        return;
    int64_t first = entropy->row_first * noting->per_row;
    int64_t end = (entropy->row_last + 1) * noting->per_row + 1;
    end = end > noting->known ? noting->known : end;
    first = first < end ? first : end - 1; /* the last one that is known */
    if (end > 0 && !marks_read(entropy, first, end))
        return;
    noting->noted = noting->known;
    entropy->mcu_due = noting->noted < noting->all ? mcu_of(entropy, noting->noted) : INT64_MAX;
}

void trail_note(struct entropy *entropy, const struct mark *mark)
{
    struct noting *noting = &entropy->noting;
    uint8_t *at = place_of(noting, noting->noted++);
    put(at, (uint32_t)mark->offset, 4);
    put(at + 4, (uint32_t)mark->bit, 1);
    for (int c = 0; c < noting->components; c++)
        put(at + 5 + 2 * c, (uint32_t)mark->dc[c], 2);
    entropy->mcu_due = noting->noted < noting->all ? mcu_of(entropy, noting->noted) : INT64_MAX;
}

void trail_leave(const struct entropy *entropy)
{
    const struct noting *noting = &entropy->noting;
    if (noting->noted > noting->known)
        __atomic_store_n((uint32_t *)(void *)noting->bytes, (uint32_t)noting->noted,
                         __ATOMIC_RELEASE);
}
