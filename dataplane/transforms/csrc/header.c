/*
 * Reads the header of a JPEG: its size, and its orientation as Pillow reads it. Reads nothing else,
 * and needs no library. No byte outside of the image is read, whatever its bytes are.
 *
 * Source: ITU-T T.81 annex B (markers); EXIF 2.32, 4.5 and 4.6.4 A (orientation); TIFF 6.0 (types);
 * XMP specification part 3, 1.1.3 (JPEG).
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
    EXIF_HEADER_BYTES = 6,
    ENTRY_BYTES = 12
};

/* The orientation of a directory that has none, or one that only Pillow knows how to read. */
enum { MISSING = 0, UNUSUAL = -1 };

static const char EXIF_HEADER[] = "Exif\0";
static const char XMP_HEADER[] = "http://ns.adobe.com/xap/1.0/";
static const char XMP_NAME[] = "tiff:Orientation";

INLINE unsigned two_bytes(const uint8_t *at, int is_little)
{
    return is_little ? at[0] | (unsigned)at[1] << 8 : (unsigned)at[0] << 8 | at[1];
}

INLINE uint32_t four_bytes(const uint8_t *at, int is_little)
{
    uint32_t first = two_bytes(at, is_little), second = two_bytes(at + 2, is_little);
    return is_little ? first | second << 16 : first << 16 | second;
}

/* The bytes of a value, by TIFF's types, and of Pillow's 13 and 16; 0 of types that it ignores. */
static const uint8_t TYPE_BYTES[] = {0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8};
/* SHORT, LONG, SBYTE, SSHORT, SLONG and IFD are whole numbers; fractions are left to Pillow. */
enum { WHOLE_NUMBERS = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 8 | 1 << 9 | 1 << 13 };
enum { TEXTS = 1 << 1 | 1 << 2 | 1 << 7 };

/* What an entry of ORIENTATION says, whose first value is at this place. */
static int turn_of(const uint8_t *value, unsigned type, int is_little)
{
    if (!(WHOLE_NUMBERS >> type & 1))
        return TEXTS >> type & 1 ? 1 : UNUSUAL;
    uint32_t turn = value[0];
    if (TYPE_BYTES[type] > 1)
        turn = TYPE_BYTES[type] == 2 ? two_bytes(value, is_little) : four_bytes(value, is_little);
    return turn >= 1 && turn <= 8 ? (int)turn : 1;
}

/* The orientation in the first directory of a TIFF structure; 1 if it is invalid. */
static int orientation_of(const uint8_t *tiff, int64_t length)
{
    if (length >= EXIF_HEADER_BYTES && memcmp(tiff, EXIF_HEADER, EXIF_HEADER_BYTES) == 0) {
        tiff += EXIF_HEADER_BYTES; /* some writers have it twice */
        length -= EXIF_HEADER_BYTES;
    }
    if (length < 8)
        return MISSING;
    if (memcmp(tiff, "II*\0", 4) != 0 && memcmp(tiff, "MM\0*", 4) != 0)
        return UNUSUAL;
    int is_little = tiff[0] == 'I';
    int64_t at = four_bytes(tiff + 4, is_little);
    if (at + 2 > length)
        return MISSING;
    int64_t entries = two_bytes(tiff + at, is_little), total = 0;
    for (at += 2; entries > 0 && at + ENTRY_BYTES <= length; entries--, at += ENTRY_BYTES) {
        unsigned type = two_bytes(tiff + at + 2, is_little);
        int64_t size = type < sizeof TYPE_BYTES ? TYPE_BYTES[type] : 0, value = at + 8;
        size *= four_bytes(tiff + at + 4, is_little);
        if (size == 0)
            continue;
        if (size > 4) { /* it is elsewhere; damaged directories are read as Pillow does */
            value = four_bytes(tiff + at + 8, is_little);
            total += size;
            if (value + size > length || total > length)
                return UNUSUAL;
        }
        if (two_bytes(tiff + at, is_little) == ORIENTATION)
            return turn_of(tiff + value, type, is_little);
    }
    return MISSING;
}

/* The orientation in a packet of XMP, an attribute or an element; 1 if it is invalid. */
static int orientation_in_xmp(const uint8_t *packet, int64_t length)
{
    enum { NAME_BYTES = sizeof XMP_NAME - 1, RARE = 5 }; /* its O is rarer than its t */
    for (int64_t at = 0; at + NAME_BYTES + 2 <= length; at++) {
        const uint8_t *rare = memchr(packet + at + RARE, XMP_NAME[RARE], (size_t)(length - at - RARE));
        if (rare == NULL)
            break;
        at = rare - packet - RARE;
        if (at + NAME_BYTES + 2 > length || memcmp(packet + at, XMP_NAME, NAME_BYTES) != 0)
            continue;
        int64_t digit = at + NAME_BYTES;
        if (packet[digit] == '>')
            digit += 1;
        else if (packet[digit] == '=' && packet[digit + 1] == '"')
            digit += 2;
        else
            continue;
        if (digit < length && packet[digit] >= '0' && packet[digit] <= '9') {
            int value = packet[digit] - '0';
            return value >= 1 && value <= 8 ? value : 1;
        }
    }
    return MISSING;
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

struct turns {
    int exif, xmp, exif_count;
};

/* As Pillow: the last packet of XMP counts, and EXIF before it. */
static void turns_read(const uint8_t *segment, int64_t length, struct turns *turns)
{
    const int64_t xmp_bytes = sizeof XMP_HEADER;
    if (length >= EXIF_HEADER_BYTES && memcmp(segment, EXIF_HEADER, EXIF_HEADER_BYTES) == 0) {
        turns->exif = orientation_of(segment + EXIF_HEADER_BYTES, length - EXIF_HEADER_BYTES);
        turns->exif_count++;
    } else if (length >= xmp_bytes && memcmp(segment, XMP_HEADER, (size_t)xmp_bytes) == 0) {
        turns->xmp = orientation_in_xmp(segment + xmp_bytes, length - xmp_bytes);
    }
}

static enum outcome turned(const struct turns *turns, struct header *header)
{
    int turn = turns->exif != MISSING ? turns->exif : turns->xmp;
    if (turn == UNUSUAL || turns->exif_count > 1)
        return FOR_PILLOW;
    header->orientation = turn == MISSING ? 1 : turn;
    return DONE;
}

enum outcome jpeg_header(const struct image *image, struct header *header, char *reason)
{
    const uint8_t *bytes = image->bytes;
    int64_t length = image->length, at = 2;
    if (length < 3 || bytes[0] != MARKER || bytes[1] != SOI || bytes[2] != MARKER)
        return FOR_PILLOW;
    struct turns turns = {MISSING, MISSING, 0};
    memset(header, 0, sizeof *header);
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
            if (header->height > 0)
                return turned(&turns, header);
            snprintf(reason, REASON_BYTES, "no frame header before the first scan");
            return FAILED;
        }
        if (at + 2 > length)
            break;
        int64_t size = two_bytes(bytes + at, 0);
        if (size < 2 || at + size > length)
            break;
        const uint8_t *segment = bytes + at + 2;
        if (is_frame(marker)) {
            enum outcome outcome = frame_read(marker, segment, size - 2, header, reason);
            if (outcome != DONE)
                return outcome;
        } else if (marker == APP1) {
            turns_read(segment, size - 2, &turns);
        }
        at += size;
    }
    snprintf(reason, REASON_BYTES, "truncated: %lld bytes end within the header", (long long)length);
    return FAILED;
}
