/* What parquet_facts.py calls, through ctypes. It has the same in Python. */

#ifndef PARQUET_FACTS_H
#define PARQUET_FACTS_H

#include <stdint.h>

#include "../compiler.h"

/*
 * `tables` are those of elements, row groups, columns and levels, each with room for `counts` rows;
 * without `tables` rows are only counted. Either way `counts` is how many there are, then the
 * file's rows, whether it is encrypted, and the field or kind that a fault is about. The result is
 * a fault, or 0.
 */
EXPORT int64_t read_parquet_facts(const uint8_t *content, int64_t length, int64_t *const *tables,
                                  int64_t *counts);

/*
 * `groups` has room for `counts[0]` rows: of each row group the number of its rows, and where it
 * begins. `counts` is how many groups there are, where their list begins, where it ends, and the
 * field or kind that a fault is about. The result is a fault, or 0.
 */
EXPORT int64_t cut_parquet_footer(const uint8_t *content, int64_t length, int64_t *groups,
                                  int64_t *counts);

/* Of the sources that this was made from: parquet_facts.py takes no other's. */
EXPORT uint32_t parquet_facts_source_crc(void);

#endif
