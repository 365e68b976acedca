/*
 * Resize by a triangle that widens as the image shrinks: Pillow's BILINEAR, torchvision's antialias.
 *
 * Each row of pixels is resized in width on arrival, to 16 bit numbers of 1/64; once all rows of a
 * result are there, they are summed up and written in the view's form. Weights are 16 bit too and
 * add up to exactly WEIGHT_ONE, so that no sum overflows, and a grey stays the same grey. A
 * mirrored result has mirrored tables; a transposed one is written transposed.
 */

#include <stdlib.h>
#include <string.h>

#include "../../compiler.h"
#include "memory.h"
#include "resize.h"
#include "rows.h"

enum { LINE_BYTES = 64 };

/* Cut the next array out of one block of memory; without a block, only add up the size. */
static void *cut(char *memory, size_t *used, size_t bytes)
{
    void *found = memory == NULL ? NULL : memory + *used;
    *used += (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    return found;
}

static size_t arrays_cut(struct resize *resize, char *memory)
{
    struct axis *rows = &resize->rows, *columns = &resize->columns;
    size_t used = 0, lanes = (size_t)columns->count * CHANNELS, taps = (size_t)rows->taps;
    rows->starts = cut(memory, &used, (size_t)rows->count * sizeof(int));
    rows->weights = cut(memory, &used, (size_t)rows->count * taps * sizeof(int16_t));
    columns->starts = cut(memory, &used, (size_t)columns->count * sizeof(int));
    columns->weights =
        cut(memory, &used, (size_t)columns->count * (size_t)columns->taps * sizeof(int16_t));
    resize->ring = cut(memory, &used, taps * resize->ring_stride * sizeof(int16_t));
    resize->held = cut(memory, &used, taps * sizeof *resize->held);
    resize->sums = cut(memory, &used, lanes * sizeof(int32_t));
    resize->scale = cut(memory, &used, lanes * sizeof(float));
    resize->bias = cut(memory, &used, lanes * sizeof(float));
    resize->line = cut(memory, &used, lanes * sizeof(float));
    return used;
}

int resize_begin(struct resize *resize, const struct header *header, int height, int width,
                 int shrink, const struct box *box, const struct view *view, uint8_t *out)
{
    struct stored_box stored = box_stored(header, box);
    int is_transposed = is_transposing(header->orientation);
    axis_measure(&resize->rows, height, stored.height / shrink,
                 is_transposed ? view->width : view->height);
    axis_measure(&resize->columns, width, stored.width / shrink,
                 is_transposed ? view->height : view->width);
    size_t lanes = (size_t)resize->columns.count * CHANNELS;
    resize->ring_stride = lanes + ROW_SLACK;
    resize->memory =
        reserved(resize->memory, &resize->memory_bytes, arrays_cut(resize, NULL) + LINE_BYTES);
    if (resize->memory == NULL)
        return 0;
    arrays_cut(resize, (char *)resize->memory + LINE_BYTES - (uintptr_t)resize->memory % LINE_BYTES);
    axis_fill(&resize->rows, height, stored.top / shrink, stored.height / shrink, 0);
    axis_fill(&resize->columns, width, stored.left / shrink, stored.width / shrink,
              stored.is_mirrored_right);
    resize->view = *view;
    resize->is_transposed = is_transposed;
    resize->out = out;
    resize->row_next = resize->rows.first;
    resize->out_next = 0;
    /* Results are made in stored row order: vertical mirroring changes only their place. */
    resize->is_mirrored_down = stored.is_mirrored_down;
    for (size_t i = 0; i < lanes; i++) {
        size_t channel = view->is_planar ? i / (size_t)resize->columns.count : i % CHANNELS;
        resize->scale[i] = view->scale[channel] / (float)(1 << SUM_BITS);
        resize->bias[i] = view->bias[channel];
    }
    return 1;
}

void resize_free(struct resize *resize)
{
    free(resize->memory);
}

int resize_padding(const struct resize *resize)
{
    return resize->columns.taps;
}
/* The place of result (row, column, channel) is a sum of strides; transposed, a row is a column. */
static void write_result(struct resize *resize, int row)
{
    const struct view *view = &resize->view;
    int count = resize->columns.count, lanes = CHANNELS * count;
    size_t size = (size_t)dtype_bytes((enum dtype)view->dtype), width = (size_t)view->width;
    size_t plane = (size_t)view->height * width;
    if (!resize->is_transposed) {
        size_t runs = view->is_planar ? CHANNELS : 1, run = (size_t)lanes / runs;
        for (size_t c = 0; c < runs; c++) {
            size_t put = view->is_planar ? c * plane + (size_t)row * width
                                         : (size_t)row * width * CHANNELS;
            view_write(resize->sums + c * run, resize->scale + c * run, resize->bias + c * run,
                       (int)run, view->dtype, resize->out + put * size);
        }
        return;
    }
    view_write(resize->sums, resize->scale, resize->bias, lanes, view->dtype, resize->line);
    for (size_t i = 0; i < (size_t)count; i++)
        for (size_t c = 0; c < CHANNELS; c++) {
            size_t lane = view->is_planar ? c * (size_t)count + i : CHANNELS * i + c;
            size_t put = i * width + (size_t)row;
            put = view->is_planar ? c * plane + put : put * CHANNELS + c;
            memcpy(resize->out + put * size, resize->line + lane * size, size);
        }
}

void resize_row(struct resize *resize, const uint8_t *pixels, int from)
{
    const struct axis *rows = &resize->rows;
    int lanes = CHANNELS * resize->columns.count, row = resize->row_next++;
    size_t stride = resize->ring_stride;
    int16_t *place = resize->ring + (size_t)(row % rows->taps) * stride;
    row_resize(&resize->columns, pixels, from, resize->view.is_planar, place);
    while (resize->out_next < rows->count) {
        int at = resize->out_next, start = rows->starts[at], taps = rows->taps;
        const int16_t *weights = rows->weights + (size_t)at * (size_t)taps;
        while (taps > 1 && weights[taps - 1] == 0)
            taps--;
        if (start + taps - 1 > row)
            return;
        for (int k = 0; k < taps; k++)
            resize->held[k] = resize->ring + (size_t)((start + k) % rows->taps) * stride;
        rows_sum(resize->held, weights, taps, lanes, resize->sums);
        write_result(resize, resize->is_mirrored_down ? rows->count - 1 - at : at);
        resize->out_next++;
    }
}
