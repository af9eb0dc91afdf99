#include "status.h"

#include <stdarg.h>
#include <stdio.h>

mxd_status mxd_fail(mxd_error *err, mxd_status status, const char *fmt, ...) {
    if (err) {
        va_list args;
        va_start(args, fmt);
        err->status = status;
        vsnprintf(err->message, sizeof err->message, fmt, args);
        va_end(args);
    }
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
