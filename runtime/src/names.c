/* SPDX-License-Identifier: Apache-2.0 */
/* The words of the public enums, and the version: the only list of each. */
#include "../include/mxdraft.h"

/* Define the function that returns the word of a value, or `none` if it has none. */
#define DEFINE_NAME(function, none, ...)                                                   \
    const char *function(uint32_t value) {                                                 \
        static const char *const words[] = {__VA_ARGS__};                                  \
        return value < sizeof words / sizeof *words && words[value] ? words[value] : none; \
    }

DEFINE_NAME(mxd_precision_name,
            NULL, [MXD_PRECISION_AUTO] = "auto", [MXD_PRECISION_BASE] = "base", [MXD_PRECISION_FULL] = "full")
DEFINE_NAME(
    mxd_draft_name,
    NULL, [MXD_DRAFT_AUTO] = "auto", [MXD_DRAFT_OFF] = "off", [MXD_DRAFT_NGRAM] = "ngram", [MXD_DRAFT_MODEL] = "model")
DEFINE_NAME(mxd_kv_name, NULL, [MXD_KV_AUTO] = "auto", [MXD_KV_F16] = "f16", [MXD_KV_INT8] = "int8",
            [MXD_KV_MXFP4] = "mxfp4", [MXD_KV_TIERED] = "tiered")
DEFINE_NAME(mxd_tier_name, NULL, [MXD_TIER_RECENT] = "recent", [MXD_TIER_CORE] = "core", [MXD_TIER_FAR] = "far")
DEFINE_NAME(mxd_stop_name, NULL, [MXD_STOP_NONE] = "none", [MXD_STOP_EOS] = "eos", [MXD_STOP_LIMIT] = "limit",
            [MXD_STOP_CONTEXT] = "context", [MXD_STOP_STRING] = "string", [MXD_STOP_GRAMMAR] = "grammar")
DEFINE_NAME(mxd_look_name,
            NULL, [MXD_LOOK_NONE] = "none", [MXD_LOOK_CORE] = "core", [MXD_LOOK_DUE] = "due", [MXD_LOOK_ALL] = "all")
DEFINE_NAME(mxd_source_name,
            NULL, [MXD_SOURCE_CALLER] = "caller", [MXD_SOURCE_COPY] = "copy", [MXD_SOURCE_TABLE] = "table",
            [MXD_SOURCE_MODEL] = "model", [MXD_SOURCE_BASE] = "base", [MXD_SOURCE_GRAMMAR] = "grammar")
DEFINE_NAME(mxd_bench_format_name,
            NULL, [MXD_BENCH_TABLE] = "table", [MXD_BENCH_CSV] = "csv", [MXD_BENCH_JSON] = "json")

DEFINE_NAME(
    mxd_status_name,
    "UNKNOWN", [MXD_OK] = "OK", [MXD_ERR_ARGUMENT] = "ARGUMENT", [MXD_ERR_IO] = "IO", [MXD_ERR_MEMORY] = "MEMORY",
    [MXD_ERR_CONTEXT] = "CONTEXT", [MXD_ERR_NUMERIC] = "NUMERIC", [MXD_ERR_UNSUPPORTED] = "UNSUPPORTED",
    [MXD_ERR_BUFFER] = "BUFFER", [MXD_ERR_MISMATCH] = "MISMATCH", [MXD_BAD_MISSING] = "MISSING",
    [MXD_BAD_MAGIC] = "MAGIC", [MXD_BAD_VERSION] = "VERSION", [MXD_BAD_LENGTH] = "LENGTH", [MXD_BAD_HEADER] = "HEADER",
    [MXD_BAD_NAME] = "NAME", [MXD_BAD_RANGE] = "RANGE", [MXD_BAD_CHECKSUM] = "CHECKSUM", [MXD_BAD_SECTION] = "SECTION",
    [MXD_BAD_CONFIG] = "CONFIG", [MXD_BAD_DTYPE] = "DTYPE", [MXD_BAD_SHAPE] = "SHAPE", [MXD_BAD_TENSOR] = "TENSOR",
    [MXD_BAD_SCALE] = "SCALE", [MXD_BAD_TOKENIZER] = "TOKENIZER", [MXD_BAD_CHAT] = "CHAT", [MXD_BAD_GOLDEN] = "GOLDEN",
    [MXD_BAD_DRAFT] = "DRAFT", [MXD_BAD_SCHEDULE] = "SCHEDULE")

const char *mxd_version(void) {
    return MXD_VERSION;
}
