/* Converts pixels that steps have changed to the delivered form. */

#ifndef PIXELS_FORM_H
#define PIXELS_FORM_H

#include <stdint.h>

#include "../../compiler.h"
#include "view.h"

/* Writes `count` images of RGB bytes, of the view's size, in the view's form: `view_bytes` each. */
EXPORT void pixels_form(const uint8_t *pixels, int64_t count, const struct view *view,
                        int64_t view_bytes, uint8_t *out);

#endif
