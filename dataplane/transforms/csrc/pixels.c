/*
 * Encoded images in memory to resized crops in a slab: JPEGs by libjpeg-turbo. Other images are
 * left to Pillow, whose pixels come back through pixels_resize.
 */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "box.h"
#include "header.h"
#include "jpeg.h"
#include "pixels.h"
#include "resize.h"

INLINE struct box box_at(const double *boxes, const uint8_t *flips, int64_t i)
{
    const double *box = boxes + 4 * i;
    return (struct box){box[0], box[1], box[2], box[3], flips[i] != 0};
}

int64_t pixels_open(char *path, char *reason)
{
    return jpeg_open(path, reason);
}

int64_t pixels_sizes(const struct image *images, int64_t count, int32_t *sizes,
                     uint8_t *outcomes, char *reason)
{
    for (int64_t i = 0; i < count; i++) {
        struct header header;
        outcomes[i] = (uint8_t)jpeg_header(images + i, &header, reason);
        if (outcomes[i] == FAILED)
            return i;
        if (outcomes[i] == FOR_PILLOW)
            continue;
        int is_transposed = is_transposing(header.orientation);
        sizes[2 * i] = is_transposed ? header.width : header.height;
        sizes[2 * i + 1] = is_transposed ? header.height : header.width;
    }
    return -1;
}

static enum outcome render(struct decoder *decoder, const struct image *image,
                           const struct restart_index *restart_index, const struct box *box,
                           const struct view *view, int may_reduce, uint8_t *out, char *reason)
{
    struct header header;
    enum outcome outcome = jpeg_header(image, &header, reason);
    if (outcome != DONE)
        return outcome;
    if (!is_box_within(&header, box)) {
        snprintf(reason, REASON_BYTES, "its box does not lie within its %d x %d pixels",
                 header.height, header.width);
        return FAILED;
    }
    return jpeg_render(decoder, image, restart_index, &header, box, view, may_reduce, out, reason);
}

int64_t pixels_render(const struct image *images,
                      const struct restart_index *restart_indexes, int64_t count,
                      const double *boxes, const uint8_t *flips, const struct view *view,
                      int64_t view_bytes, int32_t may_reduce, uint8_t *out, uint8_t *outcomes,
                      char *reason)
{
    struct decoder *decoder = decoder_new();
    int64_t failed = -1;
    snprintf(reason, REASON_BYTES, "no memory for a decoder");
    for (int64_t i = 0; i < count && failed < 0; i++) {
        struct box box = box_at(boxes, flips, i);
        outcomes[i] = decoder == NULL ? FAILED
                                      : (uint8_t)render(decoder, images + i, restart_indexes + i, &box,
                                                        view, may_reduce, out + i * view_bytes,
                                                        reason);
        if (outcomes[i] == FAILED)
            failed = i;
    }
    decoder_free(decoder);
    return failed;
}

int64_t pixels_resize(const uint8_t *pixels, const int32_t *decoded, const int32_t *stored,
                      int32_t orientation, int32_t shrink, const double *boxes,
                      const uint8_t *flips, const struct view *view, uint8_t *out)
{
    struct header header = {
        .height = stored[0], .width = stored[1], .orientation = orientation};
    struct box box = box_at(boxes, flips, 0);
    struct resize resize;
    memset(&resize, 0, sizeof resize);
    void *row = NULL;
    size_t used = (size_t)decoded[1] * PIXEL_BYTES;
    int64_t failed = 1;
    if (resize_begin(&resize, &header, decoded[0], decoded[1], shrink, &box, view, out)) {
        row = malloc(used + (size_t)resize_padding(&resize) * PIXEL_BYTES);
        for (int i = resize.rows.first; row != NULL && i < resize.rows.end; i++) {
            memcpy(row, pixels + (size_t)i * used, used);
            resize_row(&resize, row, 0);
        }
        failed = row == NULL;
    }
    resize_free(&resize);
    free(row);
    return failed;
}

uint32_t pixels_source_crc(void)
{
    return SOURCE_CRC;
}
