/* Memory that is reused between images. */

#ifndef PIXELS_MEMORY_H
#define PIXELS_MEMORY_H

#include <stddef.h>

/* Memory that only grows. NULL: out of memory, and the old block is freed. */
void *reserved(void *memory, size_t *bytes, size_t needed);

#endif
