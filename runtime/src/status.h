/* SPDX-License-Identifier: Apache-2.0 */
/* Error reporting shared by all runtime sources. */
#ifndef MXD_STATUS_H
#define MXD_STATUS_H

#include <stdarg.h>

#include "../include/mxdraft.h"

/* Print like vsnprintf, but with the C locale's decimal point: a program around the library may have set LC_NUMERIC. */
int mxd_print(char *buf, size_t cap, const char *fmt, va_list args) __attribute__((format(printf, 3, 0)));

/* Fill err (if not NULL) and return status, so that callers can write `return mxd_fail(...)`. A message that is too long
 * (a path can be) loses its middle, since the reason stands at its end. */
mxd_status mxd_fail(mxd_error *err, mxd_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Refuse a public option struct whose reserved[n] are not all 0: MXD_ERR_ARGUMENT names `type` and field. */
mxd_status mxd_check_reserved(const char *type, const uint32_t *reserved, size_t n, mxd_error *err);

#endif
