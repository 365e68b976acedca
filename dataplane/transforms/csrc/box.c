/* The place of a box in the stored image, and the resolution that it needs. */

#include "box.h"

/*
 * Orientations 2, 3, 7 and 8 mirror the stored columns, 3, 4, 6 and 7 the stored rows; 5 to 8
 * then exchange rows and columns. Source: EXIF 2.32, 4.6.4 A, Orientation.
 */
struct stored_box box_stored(const struct header *header, const struct box *box)
{
    int orientation = header->orientation, is_transposed = is_transposing(orientation);
    struct stored_box found = {
        .top = is_transposed ? box->left : box->top,
        .left = is_transposed ? box->top : box->left,
        .height = is_transposed ? box->width : box->height,
        .width = is_transposed ? box->height : box->width,
        .is_mirrored_right =
            orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8,
        .is_mirrored_down =
            orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7,
    };
    if (found.is_mirrored_right)
        found.left = header->width - found.left - found.width;
    if (found.is_mirrored_down)
        found.top = header->height - found.top - found.height;
    if (box->is_flipped && is_transposed)
        found.is_mirrored_down = !found.is_mirrored_down;
    else if (box->is_flipped)
        found.is_mirrored_right = !found.is_mirrored_right;
    return found;
}

int is_box_within(const struct header *header, const struct box *box)
{
    const double slack = 1e-6;
    int is_transposed = is_transposing(header->orientation);
    double height = is_transposed ? header->width : header->height;
    double width = is_transposed ? header->height : header->width;
    return box->height > 0.0 && box->width > 0.0 && box->top >= -slack && box->left >= -slack &&
           box->top + box->height <= height + slack && box->left + box->width <= width + slack;
}

int box_shrink(const struct box *box, int height, int width)
{
    double down = box->height / height, right = box->width / width;
    double least = down < right ? down : right;
    return least >= 8.0 ? 8 : least >= 4.0 ? 4 : least >= 2.0 ? 2 : 1;
}
