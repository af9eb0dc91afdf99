/* SPDX-License-Identifier: Apache-2.0 */
#include "schema.h"

/* Make the piece that takes a call of the function described at `node`. */
static mxd_status call_piece(mxd_nfa *n, const mxd_json *doc, uint32_t node, uint32_t name, mxd_piece *out,
                             mxd_error *err) {
    uint32_t parameters = mxd_json_get(doc, node, "parameters");
    mxd_piece p = mxd_piece_then(n, mxd_piece_text(n, "{\"name\": "), mxd_piece_literal(n, doc, name)), arguments;
    p = mxd_piece_then(n, p, mxd_piece_text(n, ", \"arguments\": "));
    mxd_status status = MXD_OK;
    if (parameters) status = mxd_schema_piece(n, doc, parameters, &arguments, err);
    else arguments = mxd_piece_text(n, "{}");
    if (status) return status;
    p = mxd_piece_then(n, p, arguments);
    *out = mxd_piece_then(n, p, mxd_piece_text(n, "}"));
    return MXD_OK;
}

mxd_status mxd_schema_tools(mxd_nfa *n, const mxd_json *tools, const char *wanted, mxd_piece *out, mxd_error *err) {
    bool some = false;
    if (!mxd_json_is(tools, 0, MXD_JSON_ARRAY)) return mxd_fail(err, MXD_ERR_ARGUMENT, "tools: not an array");
    for (uint32_t at = mxd_json_first(tools, 0), i = 0; at; at = mxd_json_next(tools, 0, at), i++) {
        uint32_t function = mxd_json_get(tools, at, "function");
        if (!function) function = at;
        uint32_t name = mxd_json_get(tools, function, "name");
        if (!name || !mxd_json_is(tools, name, MXD_JSON_STRING))
            return mxd_fail(err, MXD_ERR_ARGUMENT, "tools: number %u is no function with a name", i + 1);
        if (wanted && !mxd_json_equals(tools, name, wanted)) continue;
        mxd_piece call;
        mxd_status status = call_piece(n, tools, function, name, &call, err);
        if (status) return status;
        *out = some ? mxd_piece_or(n, *out, call) : call;
        some = true;
    }
    if (some) return MXD_OK;
    return wanted ? mxd_fail(err, MXD_ERR_ARGUMENT, "tools: none is called '%s'", wanted)
                  : mxd_fail(err, MXD_ERR_ARGUMENT, "tools: the list is empty");
}
