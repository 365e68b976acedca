/*
 * Where decoding can start within a scan, written into the JPEG: an APP15 segment before the frame.
 * To anybody else it is the same JPEG, whose scan has not changed.
 *
 *   name "dataplane\0", version, number of components            12 bytes
 *   step: MCUs from mark to mark within a row; marks             2 x uint32
 *   bytes from the scan's start to the end of the file; check    2 x uint32
 *   each mark: byte, uint32; bit, uint8; then of each component the DC so far, int16
 *
 * Numbers begin with their lowest byte. An index comes with the image, so it may be anything: it is
 * used only if it fits the frame, if its check sum, which covers samples of the scan, is right, and
 * if its bytes are in order and within the scan. Then it may still be wrong on purpose, as may every
 * pixel of an image; nothing but pixels comes of that.
 */

#include <stdlib.h>
#include <string.h>

#include "index.h"

enum {
    VERSION = 1,
    HEAD_BYTES = 28,
    SEGMENT_BYTES_MAX = 65533,
    MARKER_BYTES = 4,
    STEP_PIXELS = 32, /* a row of MCUs has a mark about every so many */
    SAMPLES = 64
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

INLINE uint64_t mixed(uint64_t sum, const uint8_t *bytes)
{
    uint64_t word = get(bytes, 4) | (uint64_t)get(bytes + 4, 4) << 32;
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
    return sum ^ sum >> 29;
}

/* Of the marks, the frame's size in MCUs, and samples of the scan: it has eight bytes at least. */
static uint32_t check_sum(const struct entropy *entropy, const uint8_t *index, size_t bytes)
{
    uint64_t sum = (uint64_t)entropy->mcus_per_row << 32 ^ (uint64_t)entropy->mcu_rows;
    for (size_t at = HEAD_BYTES; at < bytes; at += 8) {
        uint8_t eight[8] = {0};
        memcpy(eight, index + at, bytes - at < 8 ? bytes - at : 8);
        sum = mixed(sum, eight);
    }
    for (size_t i = 0; i < SAMPLES; i++)
        sum = mixed(sum, entropy->scan + (entropy->scan_bytes - 8) * i / (SAMPLES - 1));
    return (uint32_t)(sum >> 32);
}

static size_t mark_bytes(int components)
{
    return 5 + 2 * (size_t)components;
}

uint8_t *index_made(struct entropy *entropy, int components, int mcu_width, size_t *bytes)
{
    int64_t step = (STEP_PIXELS + mcu_width - 1) / mcu_width, rows = entropy->mcu_rows;
    size_t room = (SEGMENT_BYTES_MAX - HEAD_BYTES) / mark_bytes(components);
    while ((uint64_t)(rows * ((entropy->mcus_per_row + step - 1) / step)) > room &&
           step < entropy->mcus_per_row)
        step *= 2;
    if (entropy->scan_bytes < 8 || entropy->scan_bytes > UINT32_MAX ||
        (uint64_t)(rows * ((entropy->mcus_per_row + step - 1) / step)) > room)
        return NULL;
    size_t count = entropy_survey(entropy, step);
    size_t size = HEAD_BYTES + count * mark_bytes(components);
    uint8_t *segment = count == 0 ? NULL : malloc(MARKER_BYTES + size);
    if (segment == NULL)
        return NULL;
    memcpy(segment, (uint8_t[]){0xff, 0xef, (uint8_t)((size + 2) >> 8), (uint8_t)(size + 2)}, 4);
    uint8_t *index = segment + MARKER_BYTES, *at = index + HEAD_BYTES;
    memcpy(index, INDEX_NAME, INDEX_NAME_BYTES);
    index[10] = VERSION;
    index[11] = (uint8_t)components;
    put(index + 12, (uint32_t)step, 4);
    put(index + 16, (uint32_t)count, 4);
    put(index + 20, (uint32_t)entropy->scan_bytes, 4);
    for (size_t i = 0; i < count; i++, at += mark_bytes(components)) {
        const struct mark *mark = entropy->marks + i;
        put(at, (uint32_t)mark->offset, 4);
        put(at + 4, (uint32_t)mark->bit, 1);
        for (int c = 0; c < components; c++)
            put(at + 5 + 2 * c, (uint32_t)mark->dc[c], 2);
    }
    put(index + 24, check_sum(entropy, index, size), 4);
    *bytes = MARKER_BYTES + size;
    return segment;
}

static int is_of_scan(const struct entropy *entropy, int components, const uint8_t *index,
                      size_t bytes)
{
    if (bytes < HEAD_BYTES || index[10] != VERSION || index[11] != components ||
        entropy->is_restarting || entropy->scan_bytes < 8)
        return 0;
    int64_t step = get(index + 12, 4), count = get(index + 16, 4);
    return step > 0 && step <= entropy->mcus_per_row + STEP_PIXELS &&
           count == entropy->mcu_rows * ((entropy->mcus_per_row + step - 1) / step) &&
           bytes == HEAD_BYTES + (size_t)count * mark_bytes(components) &&
           get(index + 20, 4) == entropy->scan_bytes &&
           get(index + 24, 4) == check_sum(entropy, index, bytes);
}

void index_use(struct entropy *entropy, int components, const uint8_t *index, size_t bytes)
{
    if (!is_of_scan(entropy, components, index, bytes))
        return;
    int64_t step = get(index + 12, 4), count = get(index + 16, 4);
    int64_t per_row = (entropy->mcus_per_row + step - 1) / step;
    int64_t first = entropy->row_first * per_row, end = (entropy->row_last + 1) * per_row + 1;
    end = end > count ? count : end;
    if (first >= end)
        return;
    struct mark *marks = entropy_room_for_marks(entropy, (size_t)(end - first) + 1);
    if (marks == NULL)
        return;
    memset(marks, 0, sizeof *marks);
    entropy->mark_count = 1;
    for (int64_t i = first; i < end; i++) {
        const uint8_t *at = index + HEAD_BYTES + (size_t)i * mark_bytes(components);
        struct mark *mark = marks + entropy->mark_count;
        memset(mark, 0, sizeof *mark);
        mark->mcu = i / per_row * entropy->mcus_per_row + i % per_row * step;
        mark->offset = get(at, 4);
        mark->bit = at[4] & 7;
        for (int c = 0; c < components; c++)
            mark->dc[c] = (int16_t)get(at + 5 + 2 * c, 2);
        if (mark->offset < mark[-1].offset || mark->offset >= entropy->scan_bytes) {
            entropy->mark_count = 1;
            return;
        }
        entropy->mark_count++;
    }
}
