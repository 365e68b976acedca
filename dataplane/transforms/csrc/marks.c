/* Places in a scan where decoding can start: each image reuses the memory of the last one. */

#include <stdlib.h>
#include <string.h>

#include "marks.h"
#include "memory.h"

int marks_begin(struct marks *marks, size_t count)
{
    marks->all = reserved(marks->all, &marks->bytes, count * sizeof *marks->all);
    marks->count = 0;
    return marks->all != NULL;
}

struct mark *marks_add(struct marks *marks, int64_t mcu, size_t offset)
{
    struct mark *mark = marks->all + marks->count++;
    memset(mark, 0, sizeof *mark);
    mark->mcu = mcu;
    mark->offset = offset;
    return mark;
}

void marks_free(struct marks *marks)
{
    free(marks->all);
}
