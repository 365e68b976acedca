/*
 * Decode part of a JPEG with libjpeg-turbo, row by row into a resize.
 *
 * The library must match the headers of build time, with any ABI (6b or 8). When a decoder is
 * created, libjpeg itself compares the ABI and the size of its structure with those of the headers.
 *
 * A warning from libjpeg means that it guessed missing pixels, so a warning is an error here, except
 * for a few that affect no pixel.
 *
 * Compiled WITHOUT_LIBJPEG, where its headers are missing, it decodes nothing: Pillow does.
 */

#ifdef WITHOUT_LIBJPEG

#include <stdio.h>

#include "jpeg.h"

int jpeg_open(char *path, char *reason)
{
    snprintf(path, PATH_BYTES, "libpixels.so");
    snprintf(reason, REASON_BYTES, "compiled without the headers of libjpeg-turbo");
    return 0;
}

struct decoder *decoder_new(void)
{
    return NULL;
}

void decoder_free(struct decoder *decoder)
{
    (void)decoder;
}

enum outcome jpeg_render(struct decoder *decoder, const struct image *image,
                         const struct restart_index *restart_index, const struct header *header,
                         const struct box *box, const struct view *view, int may_reduce,
                         uint8_t *out, char *reason)
{
    (void)decoder, (void)image, (void)restart_index, (void)header, (void)box, (void)view;
    (void)may_reduce, (void)out, (void)reason;
    return FOR_PILLOW;
}

#else

#define _GNU_SOURCE /* dl_iterate_phdr */
#include <link.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h> /* needs stdio.h */
#include <jerror.h>  /* needs jpeglib.h */

#include "entropy.h"
#include "jpeg.h"
#include "memory.h"
#include "resize.h"

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2000090
#error "the headers of libjpeg-turbo 2.0.90 or newer are needed"
#endif

/* Separate numbers in an ABI 8 library; they differ only in files that libjpeg-turbo refuses. */
#if JPEG_LIB_VERSION >= 70
#define DCT_HEIGHT(cinfo) ((cinfo)->min_DCT_v_scaled_size)
#define DCT_WIDTH(cinfo) ((cinfo)->min_DCT_h_scaled_size)
#else
#define DCT_HEIGHT(cinfo) ((cinfo)->min_DCT_scaled_size)
#define DCT_WIDTH(cinfo) ((cinfo)->min_DCT_scaled_size)
#endif

enum {
    LINE_BYTES = 64,
    ROWS_AT_ONCE = 8,
    MARGIN = 2, /* upsampled colours also depend on the next sample, of two pixels */
    SCANS_MAX = 500  /* a hostile file can have thousands, each as slow as an image */
};

/*
 * How libjpeg decodes an MCU: the first two members of struct jpeg_entropy_decoder in jpegint.h,
 * the only private structure that is used here. They have been the same since libjpeg 6, under
 * every ABI. They are changed only if both point to functions of the library itself; if not, libjpeg
 * decodes on its own.
 */
struct methods {
    void (*start_pass)(j_decompress_ptr);
    boolean (*decode_mcu)(j_decompress_ptr, JBLOCKROW *);
};

/* libjpeg passes it back as the client_data of its own structure. */
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

static const JOCTET END[] = {0xff, JPEG_EOI};

/* Callbacks of libjpeg. */

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
        /* Between two segments they are harmless; before a restart marker, pixels are missing. */
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
 * The bytes are used up. Many files lack only their end marker, so it is supplied: if pixels are
 * missing too, libjpeg warns. Not if more scans could have followed: libjpeg would not miss them.
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

/* Returns 0, and the reason, if libjpeg cannot be used. */
static int decoder_make(struct decoder *decoder)
{
    decoder->cinfo.err = jpeg_std_error(&decoder->errors);
    decoder->cinfo.client_data = decoder;
    decoder->errors.error_exit = fail;
    decoder->errors.emit_message = warn;
    decoder->errors.output_message = say_nothing;
    if (setjmp(decoder->failed))
        return 0;
    jpeg_create_decompress(&decoder->cinfo);
    decoder->source.init_source = source_begin;
    decoder->source.fill_input_buffer = source_fill;
    decoder->source.skip_input_data = source_skip;
    decoder->source.resync_to_restart = jpeg_resync_to_restart;
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
        jpeg_destroy_decompress(&decoder->cinfo);
    resize_free(&decoder->resize);
    entropy_free(&decoder->entropy);
    free(decoder->rows);
    free(decoder);
}

/* A loaded file, which has mapped `address`; `path` is NULL while it is unknown. */
struct mapped {
    uintptr_t address, start;
    const char *path;
};

static int mapped_visit(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct mapped *mapped = arg;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = info->dlpi_phdr + i;
        uintptr_t start = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_LOAD && mapped->address - start < part->p_memsz) {
            mapped->start = info->dlpi_addr;
            mapped->path = info->dlpi_name;
        }
    }
    return mapped->path != NULL;
}

/* dladdr would do the same, but needs glibc 2.34 in a library that was linked with a newer glibc. */
static struct mapped mapped_at(uintptr_t address)
{
    struct mapped mapped = {.address = address};
    dl_iterate_phdr(mapped_visit, &mapped);
    return mapped;
}

static struct mapped libjpeg_mapped(void)
{
    return mapped_at((uintptr_t)jpeg_read_header);
}

/* libjpeg has compared ABI and structure; this compares the numbers of its messages. */
int jpeg_open(char *path, char *reason)
{
    struct decoder *decoder = decoder_new();
    const char *libjpeg = libjpeg_mapped().path;
    int is_good = 0;
    entropy_prepare();
    snprintf(path, PATH_BYTES, "%s", libjpeg != NULL ? libjpeg : "");
    snprintf(reason, REASON_BYTES, "no memory for a decoder");
    if (decoder != NULL) {
        decoder->reason = reason;
        is_good = decoder_make(decoder);
        if (is_good && strncmp(decoder->errors.jpeg_message_table[JWRN_EXTRANEOUS_DATA],
                               "Corrupt JPEG data: %u", 21) != 0) {
            snprintf(reason, REASON_BYTES, "its messages are numbered differently");
            is_good = 0;
        }
    }
    decoder_free(decoder);
    return is_good;
}

/* Pillow's conversion of CMYK, which is inverted in JPEGs. Source: Pillow, Convert.c, cmyk2rgb. */
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

/* Are these functions libjpeg's own? If not, its structure is unknown. */
static int are_of_libjpeg(struct decoder *decoder, void *const *functions)
{
    if (functions[0] == decoder->known_functions[0] && functions[1] == decoder->known_functions[1])
        return 1;
    struct mapped libjpeg = libjpeg_mapped();
    for (int i = 0; i < 2; i++) {
        struct mapped mapped = mapped_at((uintptr_t)functions[i]);
        if (mapped.path == NULL || mapped.start != libjpeg.start)
            return 0;
    }
    memcpy(decoder->known_functions, functions, sizeof decoder->known_functions);
    return 1;
}

/* Let our own functions decode the MCUs of these pixels of the decoded image. */
static void entropy_take_over(struct decoder *decoder,
                              const struct restart_index *restart_index, int top,
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
    int height = DCT_HEIGHT(cinfo) * (is_lone ? 1 : cinfo->max_v_samp_factor);
    int width = DCT_WIDTH(cinfo) * (is_lone ? 1 : cinfo->max_h_samp_factor);
    struct scan *scan = &entropy->scan;
    scan->row_first = (top < 0 ? 0 : top) / height;
    scan->row_last = (bottom - 1) / height;
    scan->column_first = (left < 0 ? 0 : left) / width;
    scan->column_last = (right - 1) / width;
    if (scan->column_last >= scan->mcus_per_row)
        scan->column_last = scan->mcus_per_row - 1;
    int whole_width = is_lone ? DCTSIZE : DCTSIZE * cinfo->max_h_samp_factor;
    entropy_follow(entropy, cinfo->num_components, whole_width, restart_index);
    methods->decode_mcu = mcu_decode;
}

/*
 * Before 3.0.0 libjpeg-turbo leaves samples undefined if it both shrinks and crops an image in
 * which one colour sample covers four pixels in a direction.
 * Source: libjpeg-turbo, ChangeLog.md, 3.0.0, 4.
 */
static int is_crop_right(const struct jpeg_decompress_struct *cinfo)
{
    int most = cinfo->max_h_samp_factor > cinfo->max_v_samp_factor ? cinfo->max_h_samp_factor
                                                                   : cinfo->max_v_samp_factor;
    return cinfo->scale_denom == 1 || most <= 2;
}

/* Decode only what the resize needs. */
static void rows_read(struct decoder *decoder, const struct restart_index *restart_index)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    struct resize *resize = &decoder->resize;
    int is_upsampled = cinfo->max_h_samp_factor > 1 || cinfo->max_v_samp_factor > 1;
    int margin = is_upsampled ? MARGIN : 0;
    int first = resize->columns.first - margin, end = resize->columns.end + margin;
    first = first < 0 ? 0 : first;
    end = end > (int)cinfo->output_width ? (int)cinfo->output_width : end;
    JDIMENSION from = 0, width = cinfo->output_width;
    entropy_take_over(decoder, restart_index, resize->rows.first - margin, resize->rows.end + margin,
                      first, end);
    if (end - first < (int)width && is_crop_right(cinfo)) {
        from = (JDIMENSION)first;
        width = (JDIMENSION)(end - first);
        jpeg_crop_scanline(cinfo, &from, &width);
    }
    size_t stride = ((size_t)width + (size_t)resize_padding(resize)) * PIXEL_BYTES;
    stride = (stride + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    decoder->rows =
        reserved(decoder->rows, &decoder->rows_bytes, stride * ROWS_AT_ONCE + 2 * LINE_BYTES);
    if (decoder->rows == NULL)
        fail_saying((j_common_ptr)cinfo, "no memory for its rows");
    /*
     * libjpeg writes aligned rows past the caches, although they are read at once: waiting for
     * them took a quarter of the time.
     */
    JSAMPROW first_row = (JSAMPROW)decoder->rows;
    first_row += LINE_BYTES - (uintptr_t)first_row % LINE_BYTES + PIXEL_BYTES;
    JSAMPROW rows[ROWS_AT_ONCE];
    for (int i = 0; i < ROWS_AT_ONCE; i++)
        rows[i] = first_row + (size_t)i * stride;
    int skipped = resize->rows.first - margin, row = 0;
    if (skipped > 0)
        row = (int)jpeg_skip_scanlines(cinfo, (JDIMENSION)skipped);
    while (row < resize->rows.end) {
        int wanted = resize->rows.end - row;
        wanted = wanted > ROWS_AT_ONCE ? ROWS_AT_ONCE : wanted;
        int count = (int)jpeg_read_scanlines(cinfo, rows, (JDIMENSION)wanted);
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
    jpeg_read_header(&decoder->cinfo, TRUE);
    decoder->is_single_scan = !jpeg_has_multiple_scans(&decoder->cinfo);
}

/*
 * Do the scans of a progressive JPEG hold every bit of every coefficient? If not, Pillow lets
 * libjpeg smooth over the missing ones, which works only on whole images.
 */
static int is_complete(const struct jpeg_decompress_struct *cinfo)
{
    if (!cinfo->progressive_mode || cinfo->coef_bits == NULL)
        return 1;
    for (int component = 0; component < cinfo->num_components; component++)
        for (int k = 0; k < DCTSIZE2; k++)
            if (cinfo->coef_bits[component][k] != 0)
                return 0;
    return 1;
}

enum outcome jpeg_render(struct decoder *decoder, const struct image *image,
                         const struct restart_index *restart_index, const struct header *header,
                         const struct box *box, const struct view *view, int may_reduce,
                         uint8_t *out, char *reason)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    decoder->reason = reason;
    if (!decoder->is_made && !decoder_make(decoder))
        return FAILED;
    if (setjmp(decoder->failed)) {
        jpeg_abort_decompress(cinfo);
        return FAILED;
    }
    decoder_begin(decoder, image);
    if ((int)cinfo->image_height != header->height || (int)cinfo->image_width != header->width)
        fail_saying((j_common_ptr)cinfo, "its headers contradict each other");
    choose_colours(decoder);
    int shrink = may_reduce ? box_shrink(box, view->height, view->width) : 1;
    cinfo->scale_num = 1;
    cinfo->scale_denom = (unsigned)shrink;
    cinfo->do_block_smoothing = FALSE;
    jpeg_start_decompress(cinfo);
    if (!is_complete(cinfo)) {
        jpeg_abort_decompress(cinfo);
        return FOR_PILLOW;
    }
    if (!resize_begin(&decoder->resize, header, (int)cinfo->output_height,
                      (int)cinfo->output_width, shrink, box, view, out))
        fail_saying((j_common_ptr)cinfo, "no memory for its resize");
    /* If libjpeg decodes on its own, nothing is noted. */
    entropy_forget(&decoder->entropy);
    rows_read(decoder, restart_index);
    entropy_leave(&decoder->entropy);
    jpeg_abort_decompress(cinfo);
    return DONE;
}

#endif
