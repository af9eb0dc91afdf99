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

const char *mxd_status_name(mxd_status status) {
    switch (status) {
    case MXD_OK: return "OK";
    case MXD_ERR_ARGUMENT: return "ARGUMENT";
    case MXD_ERR_IO: return "IO";
    case MXD_ERR_MEMORY: return "MEMORY";
    case MXD_ERR_CONTEXT: return "CONTEXT";
    case MXD_ERR_NUMERIC: return "NUMERIC";
    case MXD_ERR_UNSUPPORTED: return "UNSUPPORTED";
    case MXD_ERR_BUFFER: return "BUFFER";
    case MXD_ERR_MISMATCH: return "MISMATCH";
    case MXD_BAD_MISSING: return "MISSING";
    case MXD_BAD_MAGIC: return "MAGIC";
    case MXD_BAD_VERSION: return "VERSION";
    case MXD_BAD_LENGTH: return "LENGTH";
    case MXD_BAD_HEADER: return "HEADER";
    case MXD_BAD_NAME: return "NAME";
    case MXD_BAD_RANGE: return "RANGE";
    case MXD_BAD_CHECKSUM: return "CHECKSUM";
    case MXD_BAD_SECTION: return "SECTION";
    case MXD_BAD_CONFIG: return "CONFIG";
    case MXD_BAD_DTYPE: return "DTYPE";
    case MXD_BAD_SHAPE: return "SHAPE";
    case MXD_BAD_TENSOR: return "TENSOR";
    case MXD_BAD_SCALE: return "SCALE";
    case MXD_BAD_TOKENIZER: return "TOKENIZER";
    case MXD_BAD_CHAT: return "CHAT";
    case MXD_BAD_GOLDEN: return "GOLDEN";
    case MXD_BAD_DRAFT: return "DRAFT";
    case MXD_BAD_SCHEDULE: return "SCHEDULE";
    }
    return "UNKNOWN";
}

const char *mxd_version(void) {
    return "0.1.0";
}
