/* What parquet_footers.py calls, through ctypes. */

#ifndef PARQUET_FACTS_H
#define PARQUET_FACTS_H

#include <stdint.h>

#include "../compiler.h"

/*
 * `tables` are those of elements, row groups, columns and levels, each with room for `counts` rows;
 * without `tables` rows are only counted. `counts` returns the number of rows of each, then the
 * file's rows, whether it is encrypted, and the field or kind that caused a fault. The result is
 * a fault, or 0.
 */
EXPORT int64_t read_parquet_facts(const uint8_t *content, int64_t length, int64_t *const *tables,
                                  int64_t *counts);

/*
 * `groups` has room for `counts[0]` rows: the row count of each row group, and where it begins.
 * `counts` returns the number of groups, where their list begins, where it ends, and the field or
 * kind that caused a fault. The result is a fault, or 0.
 */
EXPORT int64_t cut_parquet_footer(const uint8_t *content, int64_t length, int64_t *groups,
                                  int64_t *counts);

/* Checksum of the sources it was compiled from: parquet_footers.py accepts only its own. */
EXPORT uint32_t parquet_facts_source_crc(void);

#endif
