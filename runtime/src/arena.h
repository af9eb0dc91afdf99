/* The engine's one block of memory, handed out in aligned pieces. */
#ifndef MXD_ARENA_H
#define MXD_ARENA_H

#include <stddef.h>

enum { MXD_ALIGN = 64 };

typedef struct mxd_arena {
    char *base; /* NULL: nothing is handed out yet, only counted */
    size_t used;
} mxd_arena;

/* Return room for `count` items of `size` bytes, or NULL while only counting. */
static inline void *mxd_take(mxd_arena *a, size_t count, size_t size) {
    void *p = a->base ? a->base + a->used : NULL;
    a->used += (count * size + MXD_ALIGN - 1) / MXD_ALIGN * MXD_ALIGN;
    return p;
}

#endif
