/*
 * What the files of libpixels.so share: the resize, the JPEG decoder, and what pixels.py hands over.
 *
 * Every coordinate is (row, column) or (height, width) in this order, as in Python. "Stored" is an
 * image as its rows lie in the file; "seen" is what its EXIF orientation makes of it.
 */

#ifndef PIXELS_H
#define PIXELS_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* One source, compiled for newer processors and for any; the loader chooses. Results are equal. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#if __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#endif
#else
#define FOR_EACH_PROCESSOR
#endif

enum { REASON_BYTES = 256, PATH_BYTES = 4096, PIXEL_BYTES = 4, PIXELS_MAX = 178956970 /* as Pillow refuses */ };
enum dtype { BYTE, HALF, BFLOAT, FLOAT };
enum outcome { DONE, FOR_PILLOW, FAILED };

/* As pixels.py lays it out. A value v of 0..255 becomes v * scale + bias, of its channel. */
struct view {
    int32_t height, width, is_planar, dtype;
    float scale[3], bias[3];
};

struct image {
    const uint8_t *bytes;
    int64_t length;
};

/* Memory in which marks of its scan are noted, and found: see trail.c. NULL where there is none. */
struct trail {
    uint8_t *bytes;
    int64_t length;
};

/* Of an image as it is seen, in pixels, and whether it is mirrored left-right afterwards. */
struct box {
    double top, left, height, width;
    int is_flipped;
};

/* What the header of an image says. */
struct header {
    int32_t height, width; /* as stored */
    int orientation;       /* EXIF's, 1..8 */
};

/* One direction of a resize: result i is the sum of `taps` pixels from starts[i] on, weighted. */
struct axis {
    int count, taps;
    int first, end; /* of the source's pixels that have any weight */
    int *starts;
    int16_t *weights; /* [count, taps], each row's sum is WEIGHT_ONE */
};

/* A resize under way: rows go in from top to bottom, as they are stored, and leave as results. */
struct resize {
    struct axis rows, columns;
    struct view view;
    int is_transposed, is_mirrored_down;
    int row_next, out_next;
    size_t ring_stride;
    int16_t *ring;        /* [rows.taps, ring_stride]: the last rows, resized in width */
    const int16_t **held; /* [rows.taps]: the rows of the ring that one result needs */
    int32_t *sums;        /* [lanes] */
    float *scale, *bias;  /* [lanes] */
    uint8_t *line;        /* [lanes] of the dtype, where the result is transposed */
    uint8_t *out;
    void *memory; /* all of the arrays above */
    size_t memory_bytes;
};

/* Memory that grows and stays: NULL says that there is none, and the old one is freed. */
void *reserved(void *memory, size_t *bytes, size_t needed);

/* Are the stored rows columns of what is seen? */
INLINE int is_transposing(int orientation)
{
    return orientation >= 5;
}

/*
 * Prepare for an image of stored height x width, shrunk to 1/shrink of that already.
 * Returns 0 where there is no memory. Rows before rows.first are not wanted, nor those after end.
 */
int resize_begin(struct resize *resize, const struct header *header, int height, int width,
                 int shrink, const struct box *box, const struct view *view, uint8_t *out);

/* One stored row of RGBX pixels; `pixels` is at column `from` of it, PADDING pixels lie behind. */
void resize_row(struct resize *resize, const uint8_t *pixels, int from);

/* Pixels that may be read, and are not used, behind the last of a row. */
int resize_padding(const struct resize *resize);

void resize_free(struct resize *resize);

/* By what the decoder may shrink an image and leave enough pixels: 1, 2, 4 or 8. */
int resize_shrink(const struct box *box, const struct view *view);

/* DONE and the header, FOR_PILLOW where it is not a JPEG, or FAILED and the reason. */
enum outcome jpeg_header(const struct image *image, struct header *header, char *reason);

struct decoder; /* One thread's: what libjpeg and the resize keep from image to image. */

struct decoder *decoder_new(void);
void decoder_free(struct decoder *decoder);

/*
 * Of an image that has this header, what lies in the box: DONE, FAILED and the reason, or FOR_PILLOW.
 * Only if it `may_reduce` is the image decoded at a half, a quarter or an eighth where that is enough.
 */
enum outcome jpeg_render(struct decoder *decoder, const struct image *image,
                         const struct trail *trail, const struct header *header,
                         const struct box *box, const struct view *view, int may_reduce,
                         uint8_t *out, char *reason);

/* 0 where the box does not lie in an image of this seen size. */
int is_box_within(const struct header *header, const struct box *box);

#endif
