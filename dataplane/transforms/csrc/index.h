/* An index of a scan, within the JPEG itself: see index.c. */

#ifndef PIXELS_INDEX_H
#define PIXELS_INDEX_H

#include "entropy.h"

/* Make the index of a scan that entropy_begin took: a segment with its marker, in memory to be freed. */
uint8_t *index_made(struct entropy *entropy, int components, int mcu_width, size_t *bytes);

/* Use an index, if it is one of this scan; the rows and columns that are needed are known. */
void index_use(struct entropy *entropy, int components, const uint8_t *index, size_t bytes);

#endif
