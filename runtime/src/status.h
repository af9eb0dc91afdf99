/* Error reporting shared by all runtime sources. */
#ifndef MXD_STATUS_H
#define MXD_STATUS_H

#include "../include/mxdraft.h"

/* Fill err (if not NULL) and return status, so that callers can write `return mxd_fail(...)`. */
mxd_status mxd_fail(mxd_error *err, mxd_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Refuse a public option struct whose reserved[n] are not all 0: MXD_ERR_ARGUMENT names `type` and field. */
mxd_status mxd_check_reserved(const char *type, const uint32_t *reserved, size_t n, mxd_error *err);

#endif
