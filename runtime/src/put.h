/* SPDX-License-Identifier: Apache-2.0 */
/* Text into a buffer of the caller's: as much as fits, ended by NUL; all of it is counted. */
#ifndef MXD_PUT_H
#define MXD_PUT_H

#include <stdarg.h>

#include "status.h"

typedef struct mxd_text {
    char *buf; /* (cap); may be NULL if cap is 0 */
    size_t cap, len;
} mxd_text;

/* Append to t what vprintf would print. */
static inline void mxd_put_args(mxd_text *t, const char *format, va_list args) {
    size_t room = t->len < t->cap ? t->cap - t->len : 0;
    t->len += (size_t)mxd_print(room ? t->buf + t->len : NULL, room, format, args);
}

/* Append to t what printf would print. */
static inline void __attribute__((format(printf, 2, 3))) mxd_put(mxd_text *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    mxd_put_args(t, format, args);
    va_end(args);
}

#endif
