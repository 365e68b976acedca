/* Inverts values from a threshold on: see random_solarize.py. */

#include "change.h"

CHANGE(RandomSolarize)
{
    if (drawn[0] >= numbers[1])
        return;
    for (int64_t i = 0; i < 3 * (int64_t)height * width; i++)
        pixels[i] = pixels[i] >= numbers[0] ? 255 - pixels[i] : pixels[i];
}
