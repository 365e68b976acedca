/* Memory that is kept from image to image: allocated again only where an image needs more of it. */

#include <stdlib.h>

#include "memory.h"

void *reserved(void *memory, size_t *bytes, size_t needed)
{
    if (*bytes >= needed)
        return memory;
    free(memory);
    memory = malloc(needed);
    *bytes = memory == NULL ? 0 : needed;
    return memory;
}
