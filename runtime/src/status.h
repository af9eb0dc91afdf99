/* Error reporting shared by all runtime sources. */
#ifndef MXD_STATUS_H
#define MXD_STATUS_H

#include "../include/mxdraft.h"

/* Fill err (if not NULL) and return status, so that callers can write `return mxd_fail(...)`. */
mxd_status mxd_fail(mxd_error *err, mxd_status status, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
