/*
 * Reads the header of a JPEG: its size, and its EXIF orientation. Reads nothing else, and needs no
 * library. No byte outside of the image is read, whatever its bytes are.
 *
 * Source: ITU-T T.81 annex B (markers); EXIF 2.32, 4.5 and 4.6.4 A (orientation).
 */

#include <stdio.h>
#include <string.h>

#include "../../compiler.h"
#include "header.h"

enum {
    MARKER = 0xff,
    SOI = 0xd8,
    EOI = 0xd9,
    SOS = 0xda,
    APP1 = 0xe1,
    TEM = 0x01,
    RST0 = 0xd0,
    ORIENTATION = 0x0112,
    SHORT = 3,
    EXIF_HEADER_BYTES = 6,
    ENTRY_BYTES = 12
};

INLINE unsigned two_bytes(const uint8_t *at, int is_little)
{
    return is_little ? at[0] | (unsigned)at[1] << 8 : (unsigned)at[0] << 8 | at[1];
}

INLINE uint32_t four_bytes(const uint8_t *at, int is_little)
{
    uint32_t first = two_bytes(at, is_little), second = two_bytes(at + 2, is_little);
    return is_little ? first | second << 16 : first << 16 | second;
}

/* The orientation in the first directory of a TIFF structure; 1 if it is missing or invalid. */
static int orientation_of(const uint8_t *tiff, int64_t length)
{
    if (length < 8 || (memcmp(tiff, "II*\0", 4) != 0 && memcmp(tiff, "MM\0*", 4) != 0))
        return 1;
    int is_little = tiff[0] == 'I';
    int64_t at = four_bytes(tiff + 4, is_little);
    if (at + 2 > length)
        return 1;
    int64_t entries = two_bytes(tiff + at, is_little);
    for (at += 2; entries > 0 && at + ENTRY_BYTES <= length; entries--, at += ENTRY_BYTES) {
        if (two_bytes(tiff + at, is_little) != ORIENTATION)
            continue;
        unsigned value = two_bytes(tiff + at + 8, is_little);
        int is_one = two_bytes(tiff + at + 2, is_little) == SHORT &&
                     four_bytes(tiff + at + 4, is_little) == 1;
        return is_one && value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static int is_frame(unsigned marker)
{
    /* SOF0 to SOF15, without DHT, JPG and DAC between them. */
    return marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc;
}

/* SOF0, 1, 2, 9 and 10: Huffman or arithmetic coding, sequential or progressive. */
static int is_frame_known(unsigned marker)
{
    return marker <= 0xc2 || marker == 0xc9 || marker == 0xca;
}

static enum outcome frame_read(unsigned marker, const uint8_t *segment, int64_t length,
                               struct header *header, char *reason)
{
    if (length < 6) {
        snprintf(reason, REASON_BYTES, "the frame header is too short");
        return FAILED;
    }
    header->height = (int32_t)two_bytes(segment + 1, 0);
    header->width = (int32_t)two_bytes(segment + 3, 0);
    if (!is_frame_known(marker) || segment[0] != 8)
        snprintf(reason, REASON_BYTES, "unsupported: JPEG frame 0x%02x of %d bits", marker,
                 segment[0]);
    else if (header->height == 0 || header->width == 0)
        snprintf(reason, REASON_BYTES, "unsupported: %d x %d pixels", header->height,
                 header->width);
    else if ((int64_t)header->height * header->width > PIXELS_MAX)
        snprintf(reason, REASON_BYTES, "too large: %d x %d pixels, more than %d", header->height,
                 header->width, PIXELS_MAX);
    else
        return DONE;
    return FAILED;
}

enum outcome jpeg_header(const struct image *image, struct header *header, char *reason)
{
    const uint8_t *bytes = image->bytes;
    int64_t length = image->length, at = 2;
    if (length < 3 || bytes[0] != MARKER || bytes[1] != SOI || bytes[2] != MARKER)
        return FOR_PILLOW;
    int is_exif_seen = 0;
    memset(header, 0, sizeof *header);
    header->orientation = 1;
    for (;;) {
        /* As in libjpeg, bytes between two segments are skipped. */
        while (at < length && bytes[at] != MARKER)
            at++;
        while (at < length && bytes[at] == MARKER)
            at++;
        if (at >= length)
            break;
        unsigned marker = bytes[at++];
        if (marker == 0 || marker == TEM || (marker >= RST0 && marker <= SOI))
            continue;
        if (marker == EOI || marker == SOS) {
            snprintf(reason, REASON_BYTES, "no frame header before the first scan");
            return FAILED;
        }
        if (at + 2 > length)
            break;
        int64_t size = two_bytes(bytes + at, 0);
        if (size < 2 || at + size > length)
            break;
        const uint8_t *segment = bytes + at + 2;
        if (is_frame(marker))
            return frame_read(marker, segment, size - 2, header, reason);
        if (marker == APP1 && !is_exif_seen && size - 2 >= EXIF_HEADER_BYTES &&
            memcmp(segment, "Exif\0", EXIF_HEADER_BYTES) == 0) {
            is_exif_seen = 1;
            header->orientation =
                orientation_of(segment + EXIF_HEADER_BYTES, size - 2 - EXIF_HEADER_BYTES);
        }
        at += size;
    }
    snprintf(reason, REASON_BYTES, "truncated: %lld bytes end within the header", (long long)length);
    return FAILED;
}
