/* The last part of a resize, for pixels that are already rounded: shares the code for numbers. */

#include "form.h"

enum { LANES = CHANNELS * 64 };

/* `count` values, each `step` bytes after the one before. */
static void run_write(const uint8_t *from, int64_t count, int step, const float *scale,
                      const float *bias, enum dtype dtype, uint8_t *out)
{
    int32_t sums[LANES];
    for (int64_t done = 0; done < count; done += LANES) {
        int lanes = count - done < LANES ? (int)(count - done) : LANES;
        for (int i = 0; i < lanes; i++)
            sums[i] = from[(done + i) * step] << SUM_BITS;
        view_write(sums, scale, bias, lanes, dtype, out + done * dtype_bytes(dtype));
    }
}

void pixels_form(const uint8_t *pixels, int64_t count, const struct view *view, int64_t view_bytes,
                 uint8_t *out)
{
    enum dtype dtype = (enum dtype)view->dtype;
    int64_t plane = (int64_t)view->height * view->width;
    int runs = view->is_planar ? CHANNELS : 1;
    for (int run = 0; run < runs; run++) {
        float scale[LANES], bias[LANES];
        for (int i = 0; i < LANES; i++) {
            int channel = view->is_planar ? run : i % CHANNELS;
            scale[i] = view->scale[channel] / (float)(1 << SUM_BITS);
            bias[i] = view->bias[channel];
        }
        int64_t values = plane * (CHANNELS / runs);
        for (int64_t i = 0; i < count; i++)
            run_write(pixels + i * plane * CHANNELS + run, values, runs, scale, bias, dtype,
                      out + i * view_bytes + run * values * dtype_bytes(dtype));
    }
}
