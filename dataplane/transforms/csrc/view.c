/* Sums to numbers of the requested dtype, in loops that compilers vectorize. */

#include <string.h>

#include "../../compiler.h"
#include "view.h"

int dtype_bytes(enum dtype dtype)
{
    return dtype == BYTE ? 1 : dtype == FLOAT ? 4 : 2;
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

/* Rounds to nearest, ties to even; too large values become an infinity. */
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
            to[i] = (uint8_t)((sums[i] + (1 << (SUM_BITS - 1))) >> SUM_BITS);
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

void view_write(const int32_t *restrict sums, const float *restrict scale,
                const float *restrict bias, int lanes, int dtype, void *restrict out)
{
    write_lanes(sums, scale, bias, lanes, dtype, out);
}
