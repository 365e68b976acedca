/* What receiving.py calls, through ctypes. */

#ifndef RECEIVE_H
#define RECEIVE_H

#include <stdint.h>

#include "../compiler.h"

/*
 * Both functions receive up to `length` bytes from a socket, and return how many they put where
 * they belong. They wait until `deadline_ms`, on the monotonic clock, and no longer than
 * `silence_ms` for the next bytes. `end` returns why they received fewer, as enum end, and the
 * number of the system's error.
 */

/* Into a file, from this offset on, without a mapping of it. */
EXPORT int64_t receive_into_file(int32_t sock, int32_t file, int64_t offset, int64_t length,
                                 int64_t deadline_ms, int64_t silence_ms, int32_t *end);

/* Into memory. */
EXPORT int64_t receive_into_memory(int32_t sock, uint8_t *into, int64_t length,
                                   int64_t deadline_ms, int64_t silence_ms, int32_t *end);

/* Checksum of the sources it was compiled from: receiving.py accepts only its own. */
EXPORT uint32_t receive_source_crc(void);

#endif
