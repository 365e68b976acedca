/*
 * Part of a JPEG, decoded by libjpeg-turbo row by row into a resize.
 *
 * The library is found at run time, since the wheels of Pillow carry one: any that speaks the
 * interface of libjpeg 6b (62) and can skip rows. libjpeg itself checks the version and the size of
 * the structures that the vendored headers describe.
 *
 * A warning of libjpeg means that it went on with guesses, so it is an error here, but for a few
 * that touch no pixel.
 */

#define _GNU_SOURCE /* dladdr */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "jpeg.h"
#include "pixels.h"
#include "trail.h"

#include "libjpeg/jerror.h"

enum {
    LINE_BYTES = 64,
    ROWS_AT_ONCE = 8,
    MARGIN = 2, /* where colours are upsampled: the sample beside counts, of two pixels */
    SCANS_MAX = 500  /* a hostile file can have many thousands, each as slow as an image */
};

struct library libjpeg;

/*
 * How libjpeg decodes an MCU: the head of jpegint.h's struct jpeg_entropy_decoder, which has been
 * the same since libjpeg 6. It is changed only where both functions are libjpeg's own.
 */
struct methods {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

static const JOCTET END[] = {0xff, JPEG_EOI};

/* What the library calls. */

static struct decoder *decoder_of(j_common_ptr cinfo)
{
    return cinfo->client_data;
}

static void fail(j_common_ptr cinfo)
{
    struct decoder *decoder = decoder_of(cinfo);
    char message[JMSG_LENGTH_MAX];
    cinfo->err->format_message(cinfo, message);
    snprintf(decoder->reason, REASON_BYTES, "%.200s", message);
    longjmp(decoder->failed, 1);
}

static void fail_saying(j_common_ptr cinfo, const char *reason)
{
    snprintf(decoder_of(cinfo)->reason, REASON_BYTES, "%s", reason);
    longjmp(decoder_of(cinfo)->failed, 1);
}

static void warn(j_common_ptr cinfo, int level)
{
    if (level >= 0)
        return;
    switch (cinfo->err->msg_code) {
    case JWRN_ADOBE_XFORM:
    case JWRN_JFIF_MAJOR:
    case JWRN_NOT_SEQUENTIAL: return;
    case JWRN_EXTRANEOUS_DATA:
        /* Between two segments they harm nobody; before a restart marker, pixels are missing. */
        if (((j_decompress_ptr)cinfo)->restart_interval == 0)
            return;
    }
    fail(cinfo);
}

static void say_nothing(j_common_ptr cinfo)
{
    (void)cinfo;
}

static void source_begin(j_decompress_ptr cinfo)
{
    (void)cinfo;
}

/*
 * The bytes are used up. Many files lack only their end marker, so it is given: if pixels were
 * missing too, libjpeg warns. Not where more scans could have followed, which it would not miss.
 */
static boolean source_fill(j_decompress_ptr cinfo)
{
    struct decoder *decoder = decoder_of((j_common_ptr)cinfo);
    if (!decoder->is_single_scan || decoder->is_end_given)
        fail_saying((j_common_ptr)cinfo, "truncated: the image goes on where its bytes end");
    decoder->is_end_given = 1;
    cinfo->src->next_input_byte = END;
    cinfo->src->bytes_in_buffer = sizeof END;
    return TRUE;
}

static void source_skip(j_decompress_ptr cinfo, long count)
{
    if (count <= 0)
        return;
    if ((size_t)count > cinfo->src->bytes_in_buffer)
        fail_saying((j_common_ptr)cinfo, "truncated: a segment goes on where its bytes end");
    cinfo->src->next_input_byte += count;
    cinfo->src->bytes_in_buffer -= (size_t)count;
}

static void progress_check(j_common_ptr cinfo)
{
    if (((j_decompress_ptr)cinfo)->input_scan_number > SCANS_MAX)
        fail_saying(cinfo, "unsupported: more than 500 scans");
}

/* Returns 0, and the reason, where libjpeg cannot be used. */
static int decoder_make(struct decoder *decoder)
{
    decoder->cinfo.err = libjpeg.std_error(&decoder->errors);
    decoder->cinfo.client_data = decoder;
    decoder->errors.error_exit = fail;
    decoder->errors.emit_message = warn;
    decoder->errors.output_message = say_nothing;
    if (setjmp(decoder->failed))
        return 0;
    libjpeg.create(&decoder->cinfo, JPEG_LIB_VERSION, sizeof decoder->cinfo);
    decoder->source.init_source = source_begin;
    decoder->source.fill_input_buffer = source_fill;
    decoder->source.skip_input_data = source_skip;
    decoder->source.resync_to_restart = libjpeg.resync;
    decoder->source.term_source = source_begin;
    decoder->cinfo.src = &decoder->source;
    decoder->progress.progress_monitor = progress_check;
    decoder->cinfo.progress = &decoder->progress;
    decoder->is_made = 1;
    return 1;
}

struct decoder *decoder_new(void)
{
    return calloc(1, sizeof(struct decoder));
}

void decoder_free(struct decoder *decoder)
{
    if (decoder == NULL)
        return;
    if (decoder->is_made)
        libjpeg.destroy(&decoder->cinfo);
    resize_free(&decoder->resize);
    entropy_free(&decoder->entropy);
    free(decoder->rows);
    free(decoder);
}

/* Does this library do what it should, with the codes of messages that the headers give? */
EXPORT int64_t pixels_open(const char *path, char *reason)
{
    entropy_prepare();
    struct { const char *name; void *place; } wanted[] = {
        {"jpeg_std_error", &libjpeg.std_error},
        {"jpeg_CreateDecompress", &libjpeg.create},
        {"jpeg_destroy_decompress", &libjpeg.destroy},
        {"jpeg_abort_decompress", &libjpeg.abort},
        {"jpeg_read_header", &libjpeg.read_header},
        {"jpeg_start_decompress", &libjpeg.start},
        {"jpeg_read_scanlines", &libjpeg.read},
        {"jpeg_skip_scanlines", &libjpeg.skip},
        {"jpeg_crop_scanline", &libjpeg.crop},
        {"jpeg_has_multiple_scans", &libjpeg.has_scans},
        {"jpeg_resync_to_restart", &libjpeg.resync},
    };
    void *opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (opened == NULL) {
        snprintf(reason, REASON_BYTES, "%.200s", dlerror());
        return 0;
    }
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(opened, wanted[i].name);
        if (found == NULL) {
            snprintf(reason, REASON_BYTES, "it has no %s", wanted[i].name);
            dlclose(opened);
            return 0;
        }
        memcpy(wanted[i].place, &found, sizeof found);
    }
    struct decoder *decoder = decoder_new();
    int is_good = 0;
    if (decoder != NULL) {
        decoder->reason = reason;
        is_good = decoder_make(decoder);
        if (is_good && strncmp(decoder->errors.jpeg_message_table[JWRN_EXTRANEOUS_DATA],
                               "Corrupt JPEG data: %u", 21) != 0) {
            snprintf(reason, REASON_BYTES, "its messages have other numbers");
            is_good = 0;
        }
    }
    decoder_free(decoder);
    if (!is_good)
        dlclose(opened);
    return is_good;
}

/* What Pillow makes of CMYK, which in JPEGs is inverted. Source: Pillow, Convert.c, cmyk2rgb. */
static void rgb_from_inverted_cmyk(uint8_t *pixels, int count)
{
    for (uint8_t *at = pixels; at < pixels + (size_t)count * PIXEL_BYTES; at += PIXEL_BYTES)
        for (int c = 0; c < 3; c++) {
            unsigned product = (255u - at[c]) * at[3] + 128u;
            at[c] = (uint8_t)(at[3] - (((product >> 8) + product) >> 8));
        }
}

static void choose_colours(struct decoder *decoder)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    switch (cinfo->jpeg_color_space) {
    case JCS_GRAYSCALE:
    case JCS_YCbCr:
    case JCS_RGB: cinfo->out_color_space = JCS_EXT_RGBX; break;
    case JCS_CMYK:
    case JCS_YCCK: cinfo->out_color_space = JCS_CMYK; break;
    default:
        snprintf(decoder->reason, REASON_BYTES, "unsupported: %d channels", cinfo->num_components);
        longjmp(decoder->failed, 1);
    }
}

static boolean mcu_decode(j_decompress_ptr cinfo, JBLOCKROW *blocks)
{
    enum entropy_fault fault = entropy_mcu(&decoder_of((j_common_ptr)cinfo)->entropy, blocks);
    if (fault != ENTROPY_FINE)
        fail_saying((j_common_ptr)cinfo, fault == ENTROPY_BROKEN ? "truncated, or corrupt"
                                                                 : "no memory for its scan");
    return TRUE;
}

/* Are these functions libjpeg's own? If not, its structure is not what we think. */
static int are_of_libjpeg(struct decoder *decoder, void *const *functions)
{
    Dl_info found, known;
    void *header = NULL;
    memcpy(&header, &libjpeg.read_header, sizeof header);
    if (functions[0] == decoder->known_functions[0] && functions[1] == decoder->known_functions[1])
        return 1;
    if (!dladdr(header, &known))
        return 0;
    for (int i = 0; i < 2; i++)
        if (!dladdr(functions[i], &found) || found.dli_fbase != known.dli_fbase)
            return 0;
    memcpy(decoder->known_functions, functions, sizeof decoder->known_functions);
    return 1;
}

/* Let our own functions decode the MCUs that hold these pixels, of the image as it is decoded. */
static void entropy_take_over(struct decoder *decoder, const struct trail *trail, int top,
                              int bottom, int left, int right)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    struct methods *methods = (struct methods *)cinfo->entropy;
    struct entropy *entropy = &decoder->entropy;
    void *functions[2];
    memcpy(functions, methods, sizeof functions);
    if (!decoder->is_single_scan || !are_of_libjpeg(decoder, functions) ||
        !entropy_begin(entropy, cinfo))
        return;
    int is_lone = cinfo->num_components == 1;
    int height = cinfo->min_DCT_scaled_size * (is_lone ? 1 : cinfo->max_v_samp_factor);
    int width = cinfo->min_DCT_scaled_size * (is_lone ? 1 : cinfo->max_h_samp_factor);
    entropy->row_first = (top < 0 ? 0 : top) / height;
    entropy->row_last = (bottom - 1) / height;
    entropy->column_first = (left < 0 ? 0 : left) / width;
    entropy->column_last = (right - 1) / width;
    if (entropy->column_last >= entropy->mcus_per_row)
        entropy->column_last = entropy->mcus_per_row - 1;
    int whole_width = is_lone ? DCTSIZE : DCTSIZE * cinfo->max_h_samp_factor;
    trail_follow(entropy, cinfo->num_components, whole_width, trail);
    methods->decode_mcu = mcu_decode;
}

/* Decode what the resize needs, and no more. */
static void rows_read(struct decoder *decoder, const struct trail *trail)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    struct resize *resize = &decoder->resize;
    int is_upsampled = cinfo->max_h_samp_factor > 1 || cinfo->max_v_samp_factor > 1;
    int margin = is_upsampled ? MARGIN : 0;
    int first = resize->columns.first - margin, end = resize->columns.end + margin;
    first = first < 0 ? 0 : first;
    end = end > (int)cinfo->output_width ? (int)cinfo->output_width : end;
    JDIMENSION from = (JDIMENSION)first, width = (JDIMENSION)(end - first);
    entropy_take_over(decoder, trail, resize->rows.first - margin, resize->rows.end + margin,
                      first, end);
    if (width < cinfo->output_width)
        libjpeg.crop(cinfo, &from, &width);
    size_t stride = ((size_t)width + (size_t)resize_padding(resize)) * PIXEL_BYTES;
    stride = (stride + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    decoder->rows =
        reserved(decoder->rows, &decoder->rows_bytes, stride * ROWS_AT_ONCE + 2 * LINE_BYTES);
    if (decoder->rows == NULL)
        fail_saying((j_common_ptr)cinfo, "no memory for its rows");
    /*
     * Rows that are aligned libjpeg writes past the caches, out of which they are wanted at once: a
     * quarter of all time went by waiting for them.
     */
    JSAMPROW first_row = (JSAMPROW)decoder->rows;
    first_row += LINE_BYTES - (uintptr_t)first_row % LINE_BYTES + PIXEL_BYTES;
    JSAMPROW rows[ROWS_AT_ONCE];
    for (int i = 0; i < ROWS_AT_ONCE; i++)
        rows[i] = first_row + (size_t)i * stride;
    int skipped = resize->rows.first - margin, row = 0;
    if (skipped > 0)
        row = (int)libjpeg.skip(cinfo, (JDIMENSION)skipped);
    while (row < resize->rows.end) {
        int wanted = resize->rows.end - row;
        wanted = wanted > ROWS_AT_ONCE ? ROWS_AT_ONCE : wanted;
        int count = (int)libjpeg.read(cinfo, rows, (JDIMENSION)wanted);
        if (count == 0)
            fail_saying((j_common_ptr)cinfo, "truncated: no more rows");
        for (int i = 0; i < count; i++, row++) {
            if (row < resize->rows.first)
                continue;
            if (cinfo->out_color_space == JCS_CMYK)
                rgb_from_inverted_cmyk(rows[i], (int)width);
            resize_row(resize, rows[i], (int)from);
        }
    }
}

static void decoder_begin(struct decoder *decoder, const struct image *image)
{
    decoder->is_single_scan = decoder->is_end_given = 0;
    decoder->source.next_input_byte = image->bytes;
    decoder->source.bytes_in_buffer = (size_t)image->length;
    libjpeg.read_header(&decoder->cinfo, TRUE);
    decoder->is_single_scan = !libjpeg.has_scans(&decoder->cinfo);
}

enum outcome jpeg_render(struct decoder *decoder, const struct image *image,
                         const struct trail *trail, const struct header *header,
                         const struct box *box, const struct view *view, uint8_t *out,
                         char *reason)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    decoder->reason = reason;
    if (!decoder->is_made && !decoder_make(decoder))
        return FAILED;
    if (setjmp(decoder->failed)) {
        libjpeg.abort(cinfo);
        return FAILED;
    }
    decoder_begin(decoder, image);
    if ((int)cinfo->image_height != header->height || (int)cinfo->image_width != header->width)
        fail_saying((j_common_ptr)cinfo, "its headers contradict each other");
    choose_colours(decoder);
    int shrink = resize_shrink(box, view);
    cinfo->scale_num = 1;
    cinfo->scale_denom = (unsigned)shrink;
    cinfo->do_block_smoothing = FALSE;
    libjpeg.start(cinfo);
    if (!resize_begin(&decoder->resize, header, (int)cinfo->output_height,
                      (int)cinfo->output_width, shrink, box, view, out))
        fail_saying((j_common_ptr)cinfo, "no memory for its resize");
    /* Of the image before; where libjpeg decodes by itself, nothing is noted. */
    decoder->entropy.noting.noted = decoder->entropy.noting.known = 0;
    rows_read(decoder, trail);
    trail_leave(&decoder->entropy);
    libjpeg.abort(cinfo);
    return DONE;
}
