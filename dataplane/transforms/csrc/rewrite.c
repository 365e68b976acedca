/*
 * JPEGs written anew, without a loss, so that a part of one can be decoded alone: those of several
 * scans get one, and every one gets an index (see index.c). What is kept: every coefficient, and
 * every segment of an application, EXIF's among them.
 */

#include <stdlib.h>
#include <string.h>

#include "index.h"
#include "jpeg.h"

enum { ROOM_BYTES = 1 << 16 };

/* Segments that libjpeg writes by itself, since it knows what they say. */
static int is_written_by_libjpeg(const struct jpeg_compress_struct *writer, jpeg_saved_marker_ptr at)
{
    return (writer->write_JFIF_header && at->marker == JPEG_APP0 && at->data_length >= 5 &&
            memcmp(at->data, "JFIF", 5) == 0) ||
           (writer->write_Adobe_marker && at->marker == JPEG_APP0 + 14 && at->data_length >= 5 &&
            memcmp(at->data, "Adobe", 5) == 0);
}

/* A JPEG being written; the decoder that is read from is also who fails. */
struct writing {
    struct jpeg_compress_struct writer;
    unsigned char *room, *bytes; /* ours, and libjpeg's if ours was too small */
    unsigned long length;
    int is_made;
};

static void sequential_write(struct decoder *decoder, struct writing *writing)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    struct jpeg_compress_struct *writer = &writing->writer;
    jvirt_barray_ptr *coefficients = libjpeg.read_coefficients(cinfo);
    writer->err = &decoder->errors;
    writer->client_data = decoder;
    libjpeg.create_writer(writer, JPEG_LIB_VERSION, sizeof *writer);
    writing->is_made = 1;
    libjpeg.write_to_memory(writer, &writing->bytes, &writing->length);
    libjpeg.copy_parameters(cinfo, writer);
    writer->optimize_coding = TRUE;
    libjpeg.write_coefficients(writer, coefficients);
    for (jpeg_saved_marker_ptr at = cinfo->marker_list; at != NULL; at = at->next)
        if (!is_written_by_libjpeg(writer, at))
            libjpeg.write_marker(writer, at->marker, at->data, at->data_length);
    libjpeg.finish_writer(writer);
}

/* The same coefficients in one sequential scan; 0 where they cannot be read. */
static int made_sequential(struct decoder *decoder, const struct image *image,
                           struct writing *writing)
{
    writing->length = (unsigned long)image->length * 2 + ROOM_BYTES;
    writing->room = writing->bytes = malloc(writing->length);
    if (writing->room == NULL)
        return 0;
    if (setjmp(decoder->failed)) {
        libjpeg.abort(&decoder->cinfo);
        return 0;
    }
    for (int marker = JPEG_APP0; marker < JPEG_APP0 + 16; marker++)
        libjpeg.save_markers(&decoder->cinfo, marker, 0xffff);
    libjpeg.save_markers(&decoder->cinfo, JPEG_COM, 0xffff);
    decoder_begin(decoder, image);
    sequential_write(decoder, writing);
    libjpeg.abort(&decoder->cinfo);
    return 1;
}

/* A sequential JPEG with an index before its frame, in memory of its own; its length, or 0. */
static int64_t made_indexed(struct decoder *decoder, const struct image *image, uint8_t **out)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    struct header header;
    if (jpeg_header(image, &header, decoder->reason) != DONE || setjmp(decoder->failed)) {
        libjpeg.abort(cinfo);
        return 0;
    }
    decoder_begin(decoder, image);
    libjpeg.start(cinfo);
    size_t bytes = 0;
    uint8_t *segment = NULL;
    int width = cinfo->num_components == 1 ? DCTSIZE : DCTSIZE * cinfo->max_h_samp_factor;
    if (decoder->is_single_scan && cinfo->restart_interval == 0 &&
        entropy_begin(&decoder->entropy, cinfo))
        segment = index_made(&decoder->entropy, cinfo->num_components, width, &bytes);
    libjpeg.abort(cinfo);
    *out = segment == NULL ? NULL : malloc((size_t)image->length + bytes);
    if (*out != NULL) {
        size_t before = (size_t)header.frame_at;
        memcpy(*out, image->bytes, before);
        memcpy(*out + before, segment, bytes);
        memcpy(*out + before + bytes, image->bytes + before, (size_t)image->length - before);
    }
    free(segment);
    return *out == NULL ? 0 : image->length + (int64_t)bytes;
}

/* Several scans, or arithmetic coding: whether it is so, 0 also where that cannot be read. */
static int is_not_sequential(struct decoder *decoder, const struct image *image)
{
    struct jpeg_decompress_struct *cinfo = &decoder->cinfo;
    if (setjmp(decoder->failed)) {
        libjpeg.abort(cinfo);
        return 0;
    }
    decoder_begin(decoder, image);
    int found = !decoder->is_single_scan || cinfo->arith_code;
    libjpeg.abort(cinfo);
    return found;
}

int64_t jpeg_rewritten(struct decoder *decoder, const struct image *image, uint8_t **out,
                       char *reason)
{
    struct header header;
    *out = NULL;
    decoder->reason = reason;
    if (jpeg_header(image, &header, reason) != DONE || header.index != NULL ||
        (!decoder->is_made && !decoder_make(decoder)))
        return 0;
    if (!is_not_sequential(decoder, image))
        return made_indexed(decoder, image, out);
    struct writing writing;
    memset(&writing, 0, sizeof writing);
    int64_t written = 0;
    if (made_sequential(decoder, image, &writing)) {
        struct image sequential = {writing.bytes, (int64_t)writing.length};
        written = made_indexed(decoder, &sequential, out);
        if (writing.bytes != writing.room)
            free(writing.bytes);
    }
    if (writing.is_made)
        libjpeg.destroy_writer(&writing.writer);
    free(writing.room);
    return written;
}
