/* The C function of a step that changes pixels: each steps/<name>.c includes this header. */

#ifndef PIXELS_CHANGE_H
#define PIXELS_CHANGE_H

#include <stdint.h>

#include "../../compiler.h"

/*
 * CHANGE(Name) is followed by the body of the function. It changes the RGB pixels
 * [height, width, 3] of one image in place, with exactly the bytes of the step's `change` in Python, if it has one.
 * `numbers` are the step's parameters, and `drawn` its random numbers for this image.
 */
#define CHANGE(name)                                                                              \
    EXPORT void change_##name(uint8_t *pixels, int32_t height, int32_t width,                     \
                              const double *numbers, const double *drawn);                        \
    void change_##name(uint8_t *pixels, int32_t height, int32_t width, const double *numbers,     \
                       const double *drawn)

#endif
