/* Memory that is reused between images: reallocated only for an image that needs more of it. */

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
