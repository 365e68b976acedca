/*
 * The restart index of an image: where decoding can start within its scan. Decoding a crop notes it
 * in memory that the caller keeps, for later crops of the same image.
 *
 *   the number of marks                                          uint32, written last
 *   each mark: byte, uint32; bit, uint8; then of each component the DC so far, int16
 *
 * All numbers but the first are little-endian. New memory is zero. There is a mark every `step`
 * MCUs of a row, and the image and the room alone determine the step: every process writes the same
 * bytes for a mark, so several may write and use marks at the same time, and be killed while they do.
 * If the count falls back, marks are forgotten, and noted again.
 *
 * Everything before a mark was decoded without a fault, so skipping it hides none. If the memory
 * held something else, pixels would be wrong, but nothing is read beyond the scan.
 */

#include <string.h>

#include "../../compiler.h"
#include "restart_index.h"

enum {
    HEAD_BYTES = 8,
    STEP_PIXELS = 32 /* distance of marks in a row of MCUs, if there is room */
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

static int64_t mcu_of(const struct noting *noting, int64_t mark)
{
    return mark / noting->per_row * noting->mcus_per_row + mark % noting->per_row * noting->step;
}

static int64_t mcu_due(const struct noting *noting)
{
    return noting->noted < noting->all ? mcu_of(noting, noting->noted) : INT64_MAX;
}

/* Returns 0 if there is no room for a mark in every row. */
static int choose_step(struct noting *noting, const struct scan *scan, int components,
                       int mcu_width, const struct restart_index *restart_index)
{
    int64_t columns = scan->mcus_per_row, step = (STEP_PIXELS + mcu_width - 1) / mcu_width;
    noting->mark_bytes = 5 + 2 * components;
    int64_t room = (restart_index->length - HEAD_BYTES) / noting->mark_bytes;
    while (step < columns && scan->mcu_rows * ((columns + step - 1) / step) > room)
        step *= 2;
    noting->bytes = restart_index->bytes;
    noting->components = components;
    noting->step = step;
    noting->per_row = (columns + step - 1) / step;
    noting->mcus_per_row = columns;
    noting->all = scan->mcu_rows * noting->per_row;
    return noting->all <= room;
}

/* Returns 0 if these are not marks of this scan. */
static int marks_read(const struct noting *noting, struct marks *marks, const struct scan *scan,
                      int64_t first, int64_t end)
{
    if (!marks_begin(marks, (size_t)(end - first) + 1))
        return 0;
    marks_add(marks, 0, 0);
    for (int64_t i = first; i < end; i++) {
        const uint8_t *at = place_of(noting, i);
        struct mark *mark = marks_add(marks, mcu_of(noting, i), get(at, 4));
        mark->bit = at[4] & 7;
        for (int c = 0; c < noting->components; c++)
            mark->dc[c] = (int16_t)get(at + 5 + 2 * c, 2);
        if (mark->offset < mark[-1].offset || mark->offset >= scan->length) {
            marks->count = 1;
            return 0;
        }
    }
    return 1;
}

void restart_index_none(struct noting *noting)
{
    memset(noting, 0, sizeof *noting);
    noting->due = INT64_MAX;
}

void restart_index_follow(struct noting *noting, struct marks *marks, const struct scan *scan,
                          int components, int mcu_width,
                          const struct restart_index *restart_index)
{
    if (restart_index->bytes == NULL || restart_index->length < HEAD_BYTES ||
        (uintptr_t)restart_index->bytes % sizeof(uint32_t) != 0 || scan->length > UINT32_MAX ||
        !choose_step(noting, scan, components, mcu_width, restart_index))
        return;
    noting->known = __atomic_load_n((const uint32_t *)(const void *)noting->bytes,
                                    __ATOMIC_ACQUIRE);
    if (noting->known > noting->all)
        return;
    int64_t first = scan->row_first * noting->per_row;
    int64_t end = (scan->row_last + 1) * noting->per_row + 1;
    end = end > noting->known ? noting->known : end;
    first = first < end ? first : end - 1; /* the last known mark */
    if (end > 0 && !marks_read(noting, marks, scan, first, end))
        return;
    noting->noted = noting->known;
    noting->due = mcu_due(noting);
}

void restart_index_note(struct noting *noting, const struct mark *mark)
{
    uint8_t *at = place_of(noting, noting->noted++);
    put(at, (uint32_t)mark->offset, 4);
    put(at + 4, (uint32_t)mark->bit, 1);
    for (int c = 0; c < noting->components; c++)
        put(at + 5 + 2 * c, (uint32_t)mark->dc[c], 2);
    noting->due = mcu_due(noting);
}

void restart_index_leave(const struct noting *noting)
{
    if (noting->noted > noting->known)
        __atomic_store_n((uint32_t *)(void *)noting->bytes, (uint32_t)noting->noted,
                         __ATOMIC_RELEASE);
}
