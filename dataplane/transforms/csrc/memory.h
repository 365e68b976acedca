/* Memory that is kept from image to image. */

#ifndef PIXELS_MEMORY_H
#define PIXELS_MEMORY_H

#include <stddef.h>

/* Memory that grows and stays: NULL says that there is none, and the old one is freed. */
void *reserved(void *memory, size_t *bytes, size_t needed);

#endif
