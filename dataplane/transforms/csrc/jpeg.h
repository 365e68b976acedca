/* libjpeg-turbo, found at run time, and what is kept of it from image to image. */

#ifndef PIXELS_JPEG_H
#define PIXELS_JPEG_H

#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>

#include "entropy.h"
#include "libjpeg/jpeglib.h"
#include "pixels.h"

struct library {
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

/* libjpeg hands it back as the client_data of its own structure. */
struct decoder {
    struct jpeg_decompress_struct cinfo;
    struct jpeg_error_mgr errors;
    struct jpeg_source_mgr source;
    struct jpeg_progress_mgr progress;
    jmp_buf failed;
    char *reason;
    int is_made, is_single_scan, is_end_given;
    struct resize resize;
    struct entropy entropy;
    void *known_functions[2]; /* of libjpeg, and checked */
    void *rows;
    size_t rows_bytes;
};

#endif
