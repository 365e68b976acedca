/* The scan of an image, and the MCUs of it that a crop needs. */

#ifndef PIXELS_SCAN_H
#define PIXELS_SCAN_H

#include <stddef.h>
#include <stdint.h>

struct scan {
    const uint8_t *bytes; /* with stuffed zeros, restart markers, and the bytes that follow */
    size_t length;
    int64_t mcus_per_row, mcu_rows;
    int64_t row_first, row_last, column_first, column_last; /* that are needed */
};

#endif
