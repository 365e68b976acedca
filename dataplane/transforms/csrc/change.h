/* What the C file of a step is that changes pixels: steps/<name>.c includes this. */

#ifndef PIXELS_CHANGE_H
#define PIXELS_CHANGE_H

#include <stdint.h>

#include "../../compiler.h"

/*
 * CHANGE(Name) begins the function of the step of that name, which does the same as its `change` in
 * Python, bit by bit: to the RGB pixels [height, width, 3] of one image, in place. `numbers` are the
 * step's parameters, and `drawn` what it has drawn for this image.
 */
#define CHANGE(name)                                                                              \
    EXPORT void change_##name(uint8_t *pixels, int32_t height, int32_t width,                     \
                              const double *numbers, const double *drawn);                        \
    void change_##name(uint8_t *pixels, int32_t height, int32_t width, const double *numbers,     \
                       const double *drawn)

#endif
