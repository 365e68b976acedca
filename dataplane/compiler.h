/* Compiler attributes for all C here: exported symbols, inlining, and processor versions. */

#ifndef DATAPLANE_COMPILER_H
#define DATAPLANE_COMPILER_H

/* Python calls it, through ctypes. All other symbols stay hidden in the library. */
#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* One source, compiled for newer processors and for all; the loader chooses. Results are equal. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#if __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#endif
#else
#define FOR_EACH_PROCESSOR
#endif

#endif
