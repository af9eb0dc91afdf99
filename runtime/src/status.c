/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "status.h"

#include <locale.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int mxd_print(char *buf, size_t cap, const char *fmt, va_list args) {
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0), around = uselocale(plain);
    int length = vsnprintf(buf, cap, fmt, args);
    uselocale(around);
    if (plain) freelocale(plain);
    return length;
}

static bool continues_character(char byte) {
    return (byte & 0xC0) == 0x80;
}

/* Copy text[length], length >= cap, to out[cap] with a NUL and an ellipsis in place of its middle. */
static void shorten(const char *text, size_t length, char *out, size_t cap) {
    static const char ellipsis[] = "\xe2\x80\xa6";
    size_t head = cap / 4, tail = cap - 1 - head - (sizeof ellipsis - 1);
    const char *end = text + length - tail;
    while (head > 0 && continues_character(text[head])) head--;
    while (continues_character(*end)) end++;
    memcpy(out, text, head);
    memcpy(out + head, ellipsis, sizeof ellipsis - 1);
    memcpy(out + head + sizeof ellipsis - 1, end, (size_t)(text + length - end) + 1);
}

mxd_status mxd_fail(mxd_error *err, mxd_status status, const char *fmt, ...) {
    if (!err) return status;
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int length = mxd_print(err->message, sizeof err->message, fmt, args);
    char *whole = length >= (int)sizeof err->message ? malloc((size_t)length + 1) : NULL;
    if (whole) {
        mxd_print(whole, (size_t)length + 1, fmt, again);
        shorten(whole, (size_t)length, err->message, sizeof err->message);
        free(whole);
    }
    va_end(again);
    va_end(args);
    err->status = status;
    return status;
}

mxd_status mxd_check_reserved(const char *type, const uint32_t *reserved, size_t n, mxd_error *err) {
    for (size_t i = 0; i < n; i++)
        if (reserved[i])
            return mxd_fail(err, MXD_ERR_ARGUMENT,
                            "%s.reserved[%zu] is %u: only 0 is known to this library, version " MXD_VERSION, type, i,
                            reserved[i]);
    return MXD_OK;
}
