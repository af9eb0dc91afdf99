/* SPDX-License-Identifier: Apache-2.0 */
#include "tool_calls.h"

#include <stdio.h>

#include "put.h"

static bool refuse_choice(ask *a, const char *reason) {
    refuse(a->server, a->connection, a->dialect, 400, "unsupported", "'tool_choice': %s", reason);
    return false;
}

/* Let each choice be a call of the tool `name`, or of any if that is NULL. */
static bool demand(ask *a, uint32_t tools, const char *name) {
    mxd_json_writer w;
    mxd_error error = {.status = MXD_OK};
    if (a->wish.grammars[0]) return refuse_choice(a, "an answer cannot fit 'response_format' and be a call");
    if (!mxd_json_is(&a->json, tools, MXD_JSON_ARRAY)) return refuse_choice(a, "there are no 'tools' to call");
    mxd_json_writer_init(&w, 2 * BODY_BYTES);
    mxd_json_put_node(&w, &a->json, tools);
    for (uint32_t i = 0; i < a->wish.choices && !error.status; i++)
        (void)mxd_grammar_compile_tools(a->server->run->model, w.data, w.len, name, &a->wish.grammars[i], &error);
    mxd_json_writer_free(&w);
    a->wish.calls_tool = true;
    return error.status ? refuse_choice(a, error.message) : true;
}

bool ask_tool_choice(ask *a) {
    const char *name = NULL;
    uint32_t tools = ask_member(a, 0, "tools"), wanted = ask_member(a, 0, "tool_choice");
    if (!wanted || mxd_json_equals(&a->json, wanted, "auto") || mxd_json_equals(&a->json, wanted, "none")) return true;
    if (mxd_json_equals(&a->json, wanted, "required")) return demand(a, tools, NULL);
    uint32_t function = ask_member(a, wanted, "function");
    if (function && !ask_text(a, function, "name", &name)) return false;
    return name ? demand(a, tools, name) : refuse_choice(a, "it has to be none, auto, required or a function's name");
}

bool is_tool_call(const exchange *e, const choice *h) {
    return e->calls_tool && h->done && (h->news.stop == MXD_STOP_GRAMMAR || h->news.stop == MXD_STOP_EOS);
}

/* Put a value as a string of JSON. */
static void put_encoded(mxd_json_writer *w, const char *name, const mxd_json *doc, uint32_t node) {
    mxd_json_writer inner;
    mxd_json_writer_init(&inner, w->limit);
    mxd_json_put_node(&inner, doc, node);
    put_string(w, name, inner.data, inner.len);
    mxd_json_writer_free(&inner);
}

void put_tool_call(const exchange *e, const choice *h, bool with_index, mxd_json_writer *w) {
    char id[ID_BYTES + 16];
    mxd_json call;
    mxd_error error;
    if (mxd_json_parse(h->text.data, h->text.length, &call, &error)) return; /* memory ran out */
    snprintf(id, sizeof id, "call_%s%u", e->id, (unsigned)h->index);
    put_open(w, "tool_calls", '[');
    mxd_json_open(w, '{');
    if (with_index) put_whole(w, "index", 0);
    put_text(w, "id", id);
    put_text(w, "type", "function");
    put_open(w, "function", '{');
    put_text(w, "name", mxd_json_text(&call, mxd_json_get(&call, 0, "name"), NULL));
    put_encoded(w, "arguments", &call, mxd_json_get(&call, 0, "arguments"));
    mxd_json_close(w, '}');
    mxd_json_close(w, '}');
    mxd_json_close(w, ']');
    mxd_json_free(&call);
}
