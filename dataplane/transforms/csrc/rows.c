/*
 * The two sums of a resize, which take most of its time: AVX2 or SSE2 on x86, plain C elsewhere,
 * with the same results.
 */

#include <string.h>

#include "../../compiler.h"
#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { ROW_SHIFT = WEIGHT_BITS - ROW_BITS };

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
    __m128i sum = _mm_set1_epi32(1 << (ROW_SHIFT - 1));
    for (int k = 0; k < taps; k += 2) {
        int32_t pair;
        memcpy(&pair, weights + k, sizeof pair);
        __m128i two = channel_pairs(pixels + PIXEL_BYTES * k);
        sum = _mm_add_epi32(sum, _mm_madd_epi16(two, _mm_set1_epi32(pair)));
    }
    return _mm_srai_epi32(sum, ROW_SHIFT);
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
    __m256i sum = _mm256_set1_epi32(1 << (ROW_SHIFT - 1));
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
    return _mm256_srai_epi32(sum, ROW_SHIFT);
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

INLINE void row_narrow(const struct axis *axis, const uint8_t *pixels, int from, int taps,
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
row_wide(const struct axis *axis, const uint8_t *pixels, int from, int taps, int is_planar,
         int16_t *out)
{
    int i = 0;
    for (; i + 4 <= axis->count; i += 4) {
        __m256i sums[2];
        /* Pairs 0 and 2, and 1 and 3: packing puts them in order. */
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

/* With a constant number of taps, the compiler unrolls the loops over them. */
#define CASES(row_with)                                                                           \
    switch (axis->taps) {                                                                         \
    case 2: row_with(axis, pixels, from, 2, is_planar, out); return;                              \
    case 4: row_with(axis, pixels, from, 4, is_planar, out); return;                              \
    case 6: row_with(axis, pixels, from, 6, is_planar, out); return;                              \
    default: row_with(axis, pixels, from, axis->taps, is_planar, out);                            \
    }

__attribute__((target("avx2"))) static void row_resize_wide(const struct axis *axis,
                                                            const uint8_t *pixels, int from,
                                                            int is_planar, int16_t *out)
{
    CASES(row_wide)
}

void row_resize(const struct axis *axis, const uint8_t *pixels, int from, int is_planar,
                int16_t *out)
{
    if (__builtin_cpu_supports("avx2")) {
        row_resize_wide(axis, pixels, from, is_planar, out);
        return;
    }
    CASES(row_narrow)
}

#else

void row_resize(const struct axis *axis, const uint8_t *pixels, int from, int is_planar,
                int16_t *out)
{
    int count = axis->count, taps = axis->taps;
    for (int i = 0; i < count; i++) {
        const uint8_t *at = pixels + PIXEL_BYTES * (axis->starts[i] - from);
        const int16_t *weights = axis->weights + (size_t)i * (size_t)taps;
        int32_t sum[PIXEL_BYTES];
        for (int c = 0; c < PIXEL_BYTES; c++)
            sum[c] = 1 << (ROW_SHIFT - 1);
        for (int k = 0; k < taps; k++)
            for (int c = 0; c < PIXEL_BYTES; c++)
                sum[c] += weights[k] * at[PIXEL_BYTES * k + c];
        for (int c = 0; c < CHANNELS; c++)
            out[is_planar ? c * count + i : CHANNELS * i + c] = (int16_t)(sum[c] >> ROW_SHIFT);
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

void rows_sum(const int16_t *const *rows, const int16_t *weights, int taps, int lanes,
              int32_t *restrict sums)
{
    sum_rows(rows, weights, taps, lanes, sums);
}
