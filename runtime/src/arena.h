/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's one block of memory, handed out in aligned pieces. */
#ifndef MXD_ARENA_H
#define MXD_ARENA_H

#include <stddef.h>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MXD_RED_ZONES
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define MXD_RED_ZONES
#endif

/* AddressSanitizer sees one mapping: in its builds every piece of the arena, and every section of a bundle, lies between
 * bytes that must not be touched. */
#ifdef MXD_RED_ZONES
#include <sanitizer/asan_interface.h>
enum { MXD_RED_ZONE = 192 };
#define MXD_FORBID(p, n) ASAN_POISON_MEMORY_REGION(p, n)
#define MXD_ALLOW(p, n) ASAN_UNPOISON_MEMORY_REGION(p, n)
#else
enum { MXD_RED_ZONE = 0 };
#define MXD_FORBID(p, n) ((void)(p), (void)(n))
#define MXD_ALLOW(p, n) ((void)(p), (void)(n))
#endif

enum { MXD_ALIGN = 64 };

typedef struct mxd_arena {
    char *base; /* NULL: nothing is handed out yet, only counted */
    size_t used;
} mxd_arena;

/* Return room for `count` items of `size` bytes, or NULL while only counting. */
static inline void *mxd_take(mxd_arena *a, size_t count, size_t size) {
    char *p = a->base ? a->base + a->used : NULL;
    size_t bytes = count * size, padded = (bytes + MXD_ALIGN - 1) / MXD_ALIGN * MXD_ALIGN + MXD_RED_ZONE;
    if (p) MXD_FORBID(p + bytes, padded - bytes);
    a->used += padded;
    return p;
}

static inline void mxd_arena_unmap(char *base, size_t bytes) {
    MXD_ALLOW(base, bytes);
    munmap(base, bytes);
}

#endif
