/* Marks of a scan that are kept from one decoding to the next: see trail.c. */

#ifndef PIXELS_TRAIL_H
#define PIXELS_TRAIL_H

#include "entropy.h"

/*
 * Use the marks of those who came by before, and note more. After entropy_begin, where the rows and
 * columns that are needed are known; `mcu_width` is in pixels of the whole image.
 */
void trail_follow(struct entropy *entropy, int components, int mcu_width,
                  const struct trail *trail);

/* The MCU that is about to be read begins here. */
void trail_note(struct entropy *entropy, const struct mark *mark);

/* What was noted is there for others. */
void trail_leave(const struct entropy *entropy);

#endif
