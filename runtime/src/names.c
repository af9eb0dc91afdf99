/* The words of the public enums, and the version: the only list of each. */
#include "../include/mxdraft.h"

/* Define the function that returns the word of a value, NULL if it has none. */
#define DEFINE_NAME(function, ...)                                         \
    const char *function(uint32_t value) {                                 \
        static const char *const words[] = {__VA_ARGS__};                  \
        return value < sizeof words / sizeof *words ? words[value] : NULL; \
    }

DEFINE_NAME(mxd_precision_name, [MXD_PRECISION_AUTO] = "auto", [MXD_PRECISION_BASE] = "base",
            [MXD_PRECISION_FULL] = "full")
DEFINE_NAME(mxd_draft_name, [MXD_DRAFT_AUTO] = "auto", [MXD_DRAFT_OFF] = "off", [MXD_DRAFT_NGRAM] = "ngram",
            [MXD_DRAFT_MODEL] = "model")
DEFINE_NAME(mxd_kv_name, [MXD_KV_AUTO] = "auto", [MXD_KV_F16] = "f16", [MXD_KV_INT8] = "int8",
            [MXD_KV_MXFP4] = "mxfp4", [MXD_KV_TIERED] = "tiered")
DEFINE_NAME(mxd_tier_name, [MXD_TIER_RECENT] = "recent", [MXD_TIER_CORE] = "core", [MXD_TIER_FAR] = "far")
DEFINE_NAME(mxd_stop_name, [MXD_STOP_NONE] = "none", [MXD_STOP_EOS] = "eos", [MXD_STOP_LIMIT] = "limit",
            [MXD_STOP_CONTEXT] = "context", [MXD_STOP_STRING] = "string")
DEFINE_NAME(mxd_look_name, [MXD_LOOK_NONE] = "none", [MXD_LOOK_CORE] = "core", [MXD_LOOK_DUE] = "due",
            [MXD_LOOK_ALL] = "all")
DEFINE_NAME(mxd_source_name, [MXD_SOURCE_CALLER] = "caller", [MXD_SOURCE_COPY] = "copy",
            [MXD_SOURCE_TABLE] = "table", [MXD_SOURCE_MODEL] = "model", [MXD_SOURCE_BASE] = "base")
DEFINE_NAME(mxd_bench_format_name, [MXD_BENCH_TABLE] = "table", [MXD_BENCH_CSV] = "csv",
            [MXD_BENCH_JSON] = "json")

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
    return MXD_VERSION;
}
