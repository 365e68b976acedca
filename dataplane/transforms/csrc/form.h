/* Pixels that steps have changed, in the form that is delivered. */

#ifndef PIXELS_FORM_H
#define PIXELS_FORM_H

#include <stdint.h>

#include "../../compiler.h"
#include "view.h"

/* Images of RGB pixels, as a view wants them: `view_bytes` each. Its size is theirs. */
EXPORT void pixels_form(const uint8_t *pixels, int64_t count, const struct view *view,
                        int64_t view_bytes, uint8_t *out);

#endif
