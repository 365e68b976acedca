/*
 * Resize by a triangle that widens as the image shrinks: Pillow's BILINEAR, torchvision's antialias.
 *
 * A row of pixels is resized in width as soon as it is there, to 16 bit numbers of 1/64; as soon as
 * the rows of a result are there, they are summed up, and written as the view wants them. Weights
 * are 16 bit too and add up to exactly WEIGHT_ONE, so that no sum leaves its range, and a grey
 * stays the same grey. A mirrored result has mirrored tables; a transposed one is written so.
 */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pixels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    CHANNELS = 3,
    WEIGHT_BITS = 14,
    WEIGHT_ONE = 1 << WEIGHT_BITS,
    HALF_BITS = 6, /* fraction of a pixel after the first direction */
    FIRST_SHIFT = WEIGHT_BITS - HALF_BITS,
    LAST_SHIFT = WEIGHT_BITS + HALF_BITS,
    TAPS_STEP = 2,
    LINE_BYTES = 64
};

static const int DTYPE_BYTES[] = {1, 2, 2, 4};

void *reserved(void *memory, size_t *bytes, size_t needed)
{
    if (*bytes >= needed)
        return memory;
    free(memory);
    memory = malloc(needed);
    *bytes = memory == NULL ? 0 : needed;
    return memory;
}

/*
 * Source: Pillow, src/libImaging/Resample.c: the centre of result i is begin + (i + 0.5) * scale,
 * and a pixel's weight falls linearly to 0 at a distance of max(scale, 1).
 */
static void axis_measure(struct axis *axis, int size, double extent, int count)
{
    double scale = extent / count;
    int taps = scale < 1.0 ? 3 : (int)ceil(2.0 * scale) + 1;
    taps = taps > size ? size : taps;
    axis->count = count;
    axis->taps = (taps + TAPS_STEP - 1) / TAPS_STEP * TAPS_STEP;
}

/* The tables, for which there is room now. */
static void axis_fill(struct axis *axis, int size, double begin, double extent, int is_mirrored)
{
    int count = axis->count, taps = axis->taps;
    double scale = extent / count, support = scale < 1.0 ? 1.0 : scale;
    axis->first = size;
    axis->end = 0;
    for (int i = 0; i < count; i++) {
        double centre = begin + (i + 0.5) * scale;
        int start = (int)(centre - support + 0.5), end = (int)(centre + support + 0.5);
        start = start < 0 ? 0 : start >= size ? size - 1 : start;
        end = end > size ? size : end <= start ? start + 1 : end;
        end = end > start + taps ? start + taps : end;
        int at = is_mirrored ? count - 1 - i : i;
        int16_t *weights = axis->weights + (size_t)at * (size_t)taps;
        double total = 0.0, sum = 0.0;
        for (int k = start; k < end; k++) {
            double weight = 1.0 - fabs(k + 0.5 - centre) / support;
            total += weight > 0.0 ? weight : 0.0;
        }
        int given = 0;
        memset(weights, 0, (size_t)taps * sizeof *weights);
        for (int k = start; k < end; k++) {
            double weight = 1.0 - fabs(k + 0.5 - centre) / support;
            sum += weight > 0.0 ? weight : 0.0;
            /* What the weights so far should add up to, rounded: no error adds up. */
            int due = total > 0.0 ? (int)(sum / total * WEIGHT_ONE + 0.5) : WEIGHT_ONE;
            due = k == end - 1 ? WEIGHT_ONE : due;
            weights[k - start] = (int16_t)(due - given);
            given = due;
        }
        axis->starts[at] = start;
        axis->first = start < axis->first ? start : axis->first;
        axis->end = end > axis->end ? end : axis->end;
    }
}

/* The box in pixels of the stored image; its direction is in the tables' mirroring. */
struct stored_box {
    double top, left, height, width;
    int is_mirrored_down, is_mirrored_right; /* results run against the stored rows, columns */
};

/*
 * Orientations 2, 3, 7 and 8 mirror the stored columns, 3, 4, 6 and 7 the stored rows; 5 to 8
 * exchange rows and columns then. Source: EXIF 2.32, 4.6.4 A, Orientation.
 */
static struct stored_box box_stored(const struct header *header, const struct box *box)
{
    int orientation = header->orientation, is_transposed = is_transposing(orientation);
    struct stored_box found = {
        .top = is_transposed ? box->left : box->top,
        .left = is_transposed ? box->top : box->left,
        .height = is_transposed ? box->width : box->height,
        .width = is_transposed ? box->height : box->width,
        .is_mirrored_right =
            orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8,
        .is_mirrored_down =
            orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7,
    };
    if (found.is_mirrored_right)
        found.left = header->width - found.left - found.width;
    if (found.is_mirrored_down)
        found.top = header->height - found.top - found.height;
    if (box->is_flipped && is_transposed)
        found.is_mirrored_down = !found.is_mirrored_down;
    else if (box->is_flipped)
        found.is_mirrored_right = !found.is_mirrored_right;
    return found;
}

int is_box_within(const struct header *header, const struct box *box)
{
    const double slack = 1e-6;
    int is_transposed = is_transposing(header->orientation);
    double height = is_transposed ? header->width : header->height;
    double width = is_transposed ? header->height : header->width;
    return box->height > 0.0 && box->width > 0.0 && box->top >= -slack && box->left >= -slack &&
           box->top + box->height <= height + slack && box->left + box->width <= width + slack;
}

int resize_shrink(const struct box *box, const struct view *view)
{
    double down = box->height / view->height, right = box->width / view->width;
    double least = down < right ? down : right;
    return least >= 8.0 ? 8 : least >= 4.0 ? 4 : least >= 2.0 ? 2 : 1;
}

/* Cut the next array out of one piece of memory; without memory it only adds up what is needed. */
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
    /* The last store of a row writes a lane more than it has. */
    resize->ring_stride = lanes + 8;
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
    /* Down, results are made in the order of the stored rows: only their place is mirrored. */
    resize->is_mirrored_down = stored.is_mirrored_down;
    for (size_t i = 0; i < lanes; i++) {
        size_t channel = view->is_planar ? i / (size_t)resize->columns.count : i % CHANNELS;
        resize->scale[i] = view->scale[channel] / (float)(1 << LAST_SHIFT);
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

#if defined(__x86_64__)

/* Two pixels of RGBX, as 16 bit pairs of one channel: r0 r1 g0 g1 b0 b1 x0 x1. */
INLINE __m128i channel_pairs(const uint8_t *pixels)
{
    __m128i two = _mm_loadl_epi64((const __m128i *)pixels);
    two = _mm_unpacklo_epi8(two, _mm_srli_si128(two, PIXEL_BYTES));
    return _mm_unpacklo_epi8(two, _mm_setzero_si128());
}

/* The weighted sum of some pixels: four channels of 1/64, 32 bits each. */
INLINE __m128i weighed(const uint8_t *pixels, const int16_t *weights, int taps)
{
    __m128i sum = _mm_set1_epi32(1 << (FIRST_SHIFT - 1));
    for (int k = 0; k < taps; k += 2) {
        int32_t pair;
        memcpy(&pair, weights + k, sizeof pair);
        __m128i two = channel_pairs(pixels + PIXEL_BYTES * k);
        sum = _mm_add_epi32(sum, _mm_madd_epi16(two, _mm_set1_epi32(pair)));
    }
    return _mm_srai_epi32(sum, FIRST_SHIFT);
}

/*
 * The same for two results at once, one in each half; `taps` is even.
 * The weights of a pair of pixels are spread over its four channels.
 */
__attribute__((target("avx2"), always_inline)) static inline __m256i
weighed_two(const uint8_t *first, const int16_t *first_weights, const uint8_t *second,
            const int16_t *second_weights, int taps)
{
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m256i pairs = _mm256_broadcastsi128_si256(order), zero = _mm256_setzero_si256();
    __m256i sum = _mm256_set1_epi32(1 << (FIRST_SHIFT - 1));
    int k = 0;
    for (; k + 4 <= taps; k += 4) {
        __m256i four = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(first + PIXEL_BYTES * k))),
            _mm_loadu_si128((const __m128i *)(second + PIXEL_BYTES * k)), 1);
        __m256i weights = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(first_weights + k))),
            _mm_loadl_epi64((const __m128i *)(second_weights + k)), 1);
        four = _mm256_shuffle_epi8(four, pairs);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_unpacklo_epi8(four, zero),
                                                      _mm256_shuffle_epi32(weights, 0x00)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_unpackhi_epi8(four, zero),
                                                      _mm256_shuffle_epi32(weights, 0x55)));
    }
    if (k < taps) {
        __m256i two = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(first + PIXEL_BYTES * k))),
            _mm_loadl_epi64((const __m128i *)(second + PIXEL_BYTES * k)), 1);
        int32_t first_pair, second_pair;
        memcpy(&first_pair, first_weights + k, sizeof first_pair);
        memcpy(&second_pair, second_weights + k, sizeof second_pair);
        __m256i weights = _mm256_inserti128_si256(_mm256_set1_epi32(first_pair),
                                                  _mm_set1_epi32(second_pair), 1);
        two = _mm256_unpacklo_epi8(_mm256_shuffle_epi8(two, pairs), zero);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(two, weights));
    }
    return _mm256_srai_epi32(sum, FIRST_SHIFT);
}

/* Four results, two in each of low and high, as three planes or pixel by pixel. */
INLINE void four_put(__m128i low, __m128i high, int count, int i, int is_planar, int16_t *out)
{
    if (is_planar) {
        __m128i even = _mm_unpacklo_epi16(low, high);      /* r0 r2 g0 g2 b0 b2 .. */
        __m128i odd = _mm_unpackhi_epi16(low, high);       /* r1 r3 g1 g3 b1 b3 .. */
        __m128i red_green = _mm_unpacklo_epi16(even, odd); /* r0 r1 r2 r3 g0 .. */
        __m128i blue = _mm_unpackhi_epi16(even, odd);
        _mm_storel_epi64((__m128i *)(out + i), red_green);
        _mm_storel_epi64((__m128i *)(out + count + i), _mm_srli_si128(red_green, 8));
        _mm_storel_epi64((__m128i *)(out + 2 * (size_t)count + i), blue);
        return;
    }
    /* Each store's last lane is overwritten by the next; the ring ends with room for it. */
    int16_t *at = out + CHANNELS * i;
    _mm_storel_epi64((__m128i *)at, low);
    _mm_storel_epi64((__m128i *)(at + 3), _mm_srli_si128(low, 8));
    _mm_storel_epi64((__m128i *)(at + 6), high);
    _mm_storel_epi64((__m128i *)(at + 9), _mm_srli_si128(high, 8));
}

INLINE void one_put(__m128i sum, int count, int i, int is_planar, int16_t *out)
{
    int16_t channels[8];
    _mm_storeu_si128((__m128i *)channels, _mm_packs_epi32(sum, sum));
    for (int c = 0; c < CHANNELS; c++)
        out[is_planar ? c * count + i : CHANNELS * i + c] = channels[c];
}

INLINE void rest_resized(const struct axis *axis, const uint8_t *pixels, int from, int taps, int i,
                         int is_planar, int16_t *out)
{
    for (; i < axis->count; i++)
        one_put(weighed(pixels + PIXEL_BYTES * (axis->starts[i] - from),
                        axis->weights + (size_t)i * (size_t)taps, taps),
                axis->count, i, is_planar, out);
}

INLINE void row_resized(const struct axis *axis, const uint8_t *pixels, int from, int taps,
                        int is_planar, int16_t *out)
{
    int i = 0;
    for (; i + 4 <= axis->count; i += 4) {
        __m128i sums[4];
        for (int k = 0; k < 4; k++)
            sums[k] = weighed(pixels + PIXEL_BYTES * (axis->starts[i + k] - from),
                              axis->weights + (size_t)(i + k) * (size_t)taps, taps);
        four_put(_mm_packs_epi32(sums[0], sums[1]), _mm_packs_epi32(sums[2], sums[3]),
                 axis->count, i, is_planar, out);
    }
    rest_resized(axis, pixels, from, taps, i, is_planar, out);
}

__attribute__((target("avx2"), always_inline)) static inline void
row_resized_wide(const struct axis *axis, const uint8_t *pixels, int from, int taps, int is_planar,
                 int16_t *out)
{
    int i = 0;
    for (; i + 4 <= axis->count; i += 4) {
        __m256i sums[2];
        /* Of 0 and 2, and of 1 and 3: packed, they are in order. */
        for (int k = 0; k < 2; k++)
            sums[k] = weighed_two(pixels + PIXEL_BYTES * (axis->starts[i + k] - from),
                                  axis->weights + (size_t)(i + k) * (size_t)taps,
                                  pixels + PIXEL_BYTES * (axis->starts[i + k + 2] - from),
                                  axis->weights + (size_t)(i + k + 2) * (size_t)taps, taps);
        __m256i four = _mm256_packs_epi32(sums[0], sums[1]);
        four_put(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1), axis->count, i,
                 is_planar, out);
    }
    rest_resized(axis, pixels, from, taps, i, is_planar, out);
}

/* With a constant number of taps, the loops over them vanish. */
#define CASES(row_resized)                                                                        \
    switch (axis->taps) {                                                                         \
    case 2: row_resized(axis, pixels, from, 2, is_planar, out); return;                           \
    case 4: row_resized(axis, pixels, from, 4, is_planar, out); return;                           \
    case 6: row_resized(axis, pixels, from, 6, is_planar, out); return;                           \
    default: row_resized(axis, pixels, from, axis->taps, is_planar, out);                         \
    }

__attribute__((target("avx2"))) static void row_to_ring_wide(const struct axis *axis,
                                                             const uint8_t *pixels, int from,
                                                             int is_planar, int16_t *out)
{
    CASES(row_resized_wide)
}

static void row_to_ring(const struct axis *axis, const uint8_t *pixels, int from, int is_planar,
                        int16_t *out)
{
    if (__builtin_cpu_supports("avx2")) {
        row_to_ring_wide(axis, pixels, from, is_planar, out);
        return;
    }
    CASES(row_resized)
}

#else

static void row_to_ring(const struct axis *axis, const uint8_t *pixels, int from, int is_planar,
                        int16_t *out)
{
    int count = axis->count, taps = axis->taps;
    for (int i = 0; i < count; i++) {
        const uint8_t *at = pixels + PIXEL_BYTES * (axis->starts[i] - from);
        const int16_t *weights = axis->weights + (size_t)i * (size_t)taps;
        int32_t sum[PIXEL_BYTES];
        for (int c = 0; c < PIXEL_BYTES; c++)
            sum[c] = 1 << (FIRST_SHIFT - 1);
        for (int k = 0; k < taps; k++)
            for (int c = 0; c < PIXEL_BYTES; c++)
                sum[c] += weights[k] * at[PIXEL_BYTES * k + c];
        for (int c = 0; c < CHANNELS; c++)
            out[is_planar ? c * count + i : CHANNELS * i + c] = (int16_t)(sum[c] >> FIRST_SHIFT);
    }
}

#endif

INLINE void sum_of(const int16_t *const *rows, const int16_t *weights, int taps, int lanes,
                   int32_t *sums)
{
    for (int i = 0; i < lanes; i++) {
        int32_t sum = 0;
        for (int k = 0; k < taps; k++)
            sum += weights[k] * rows[k][i];
        sums[i] = sum;
    }
}

FOR_EACH_PROCESSOR
static void sum_rows(const int16_t *const *rows, const int16_t *weights, int taps, int lanes,
                     int32_t *restrict sums)
{
    switch (taps) {
    case 1: sum_of(rows, weights, 1, lanes, sums); return;
    case 2: sum_of(rows, weights, 2, lanes, sums); return;
    case 3: sum_of(rows, weights, 3, lanes, sums); return;
    case 4: sum_of(rows, weights, 4, lanes, sums); return;
    case 5: sum_of(rows, weights, 5, lanes, sums); return;
    default: sum_of(rows, weights, 5, lanes, sums);
    }
    for (int k = 5; k < taps; k++) {
        const int16_t *row = rows[k];
        int16_t weight = weights[k];
        for (int i = 0; i < lanes; i++)
            sums[i] += weight * row[i];
    }
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* To the nearest, ties to even; what is too large becomes an infinity. */
INLINE uint16_t half_of(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t normal = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    /* Adding 0.5 moves the last bit of a half's subnormal to the last bit of the float. */
    uint32_t small = bits_of(float_of(size) + 0.5f) - 0x3f000000u;
    uint32_t found = size < 0x38800000u ? small : normal;
    found = size >= 0x477ff000u ? 0x7c00u : found;
    return (uint16_t)(found | sign);
}

INLINE uint16_t bfloat_of(float value)
{
    uint32_t bits = bits_of(value);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

FOR_EACH_PROCESSOR
static void write_lanes(const int32_t *restrict sums, const float *restrict scale,
                        const float *restrict bias, int lanes, int dtype, void *restrict out)
{
    if (dtype == BYTE) {
        uint8_t *to = out;
        for (int i = 0; i < lanes; i++)
            to[i] = (uint8_t)((sums[i] + (1 << (LAST_SHIFT - 1))) >> LAST_SHIFT);
    } else if (dtype == FLOAT) {
        float *to = out;
        for (int i = 0; i < lanes; i++)
            to[i] = (float)sums[i] * scale[i] + bias[i];
    } else if (dtype == HALF) {
        uint16_t *to = out;
        for (int i = 0; i < lanes; i++)
            to[i] = half_of((float)sums[i] * scale[i] + bias[i]);
    } else {
        uint16_t *to = out;
        for (int i = 0; i < lanes; i++)
            to[i] = bfloat_of((float)sums[i] * scale[i] + bias[i]);
    }
}

/* Where result (row, column, channel) lies is a sum of strides; a transposed row is a column. */
static void write_result(struct resize *resize, int row)
{
    const struct view *view = &resize->view;
    int count = resize->columns.count, lanes = CHANNELS * count;
    size_t size = (size_t)DTYPE_BYTES[view->dtype], width = (size_t)view->width;
    size_t plane = (size_t)view->height * width;
    if (!resize->is_transposed) {
        size_t runs = view->is_planar ? CHANNELS : 1, run = (size_t)lanes / runs;
        for (size_t c = 0; c < runs; c++) {
            size_t put = view->is_planar ? c * plane + (size_t)row * width
                                         : (size_t)row * width * CHANNELS;
            write_lanes(resize->sums + c * run, resize->scale + c * run, resize->bias + c * run,
                        (int)run, view->dtype, resize->out + put * size);
        }
        return;
    }
    write_lanes(resize->sums, resize->scale, resize->bias, lanes, view->dtype, resize->line);
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
    row_to_ring(&resize->columns, pixels, from, resize->view.is_planar, place);
    while (resize->out_next < rows->count) {
        int at = resize->out_next, start = rows->starts[at], taps = rows->taps;
        const int16_t *weights = rows->weights + (size_t)at * (size_t)taps;
        while (taps > 1 && weights[taps - 1] == 0)
            taps--;
        if (start + taps - 1 > row)
            return;
        for (int k = 0; k < taps; k++)
            resize->held[k] = resize->ring + (size_t)((start + k) % rows->taps) * stride;
        sum_rows(resize->held, weights, taps, lanes, resize->sums);
        write_result(resize, resize->is_mirrored_down ? rows->count - 1 - at : at);
        resize->out_next++;
    }
}
