/* The functions of libjpeg-turbo that are used, found at run time. */

#ifndef PIXELS_JPEG_H
#define PIXELS_JPEG_H

#include <stddef.h>
#include <stdio.h>

#include "libjpeg/jpeglib.h"

struct library {
    int is_open;
    struct jpeg_error_mgr *(*std_error)(struct jpeg_error_mgr *);
    void (*create)(j_decompress_ptr, int version, size_t struct_bytes);
    void (*destroy)(j_decompress_ptr);
    void (*abort)(j_decompress_ptr);
    int (*read_header)(j_decompress_ptr, boolean);
    boolean (*start)(j_decompress_ptr);
    JDIMENSION (*read)(j_decompress_ptr, JSAMPARRAY, JDIMENSION);
    JDIMENSION (*skip)(j_decompress_ptr, JDIMENSION);
    void (*crop)(j_decompress_ptr, JDIMENSION *from, JDIMENSION *width);
    boolean (*has_scans)(j_decompress_ptr);
    boolean (*resync)(j_decompress_ptr, int);
};

extern struct library libjpeg;

#endif
