/* What is kept of libjpeg-turbo from image to image. */

#ifndef PIXELS_JPEG_H
#define PIXELS_JPEG_H

#include <setjmp.h>
#include <stddef.h>
#include <stdio.h>
#include <jpeglib.h> /* needs stdio.h */

#include "entropy.h"
#include "pixels.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000090
#error "the headers of libjpeg-turbo 2.0.90 or newer are needed"
#endif

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
