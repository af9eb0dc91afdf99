/* SPDX-License-Identifier: Apache-2.0 */
/* OpenAI's Responses API, as far as a model of text without a memory serves it: each request brings the whole talk. */
#include <stdio.h>
#include <string.h>

#include "openai.h"
#include "put.h"
#include "request.h"

/* ---- words ---- */

static void put_id(mxd_json_writer *w, const char *name, const char *prefix, const exchange *e) {
    char id[ID_BYTES + 16];
    snprintf(id, sizeof id, "%s_%s", prefix, e->id);
    put_text(w, name, id);
}

static bool is_cut(const exchange *e) {
    mxd_stop stop = e->choices[0].news.stop;
    return stop == MXD_STOP_LIMIT || stop == MXD_STOP_CONTEXT;
}

/* How far an answer is. */
typedef enum stage { BEGUN, ENDED } stage;

static const char *status_at(const exchange *e, stage at) {
    return at == BEGUN ? "in_progress" : is_cut(e) ? "incomplete" : "completed";
}

/* Put the object of a text: empty when it is begun. */
static void put_part(const exchange *e, stage at, mxd_json_writer *w) {
    const text_buffer *text = &e->choices[0].text;
    mxd_json_open(w, '{');
    put_text(w, "type", "output_text");
    put_string(w, "text", text->data, at == BEGUN ? 0 : text->length);
    put_open(w, "annotations", '[');
    mxd_json_close(w, ']');
    put_open(w, "logprobs", '[');
    mxd_json_close(w, ']');
    mxd_json_close(w, '}');
}

/* Put the message, the one item of an answer. */
static void put_item(const exchange *e, stage at, mxd_json_writer *w) {
    mxd_json_open(w, '{');
    put_text(w, "type", "message");
    put_id(w, "id", "msg", e);
    put_text(w, "status", status_at(e, at));
    put_text(w, "role", "assistant");
    put_open(w, "content", '[');
    if (at == ENDED) put_part(e, at, w);
    mxd_json_close(w, ']');
    mxd_json_close(w, '}');
}

static void put_usage(const exchange *e, mxd_json_writer *w) {
    uint64_t generated = exchange_generated(e);
    put_open(w, "usage", '{');
    put_whole(w, "input_tokens", e->prompt_tokens);
    put_open(w, "input_tokens_details", '{');
    put_whole(w, "cached_tokens", exchange_cached(e));
    mxd_json_close(w, '}');
    put_whole(w, "output_tokens", generated);
    put_open(w, "output_tokens_details", '{');
    put_whole(w, "reasoning_tokens", 0);
    mxd_json_close(w, '}');
    put_whole(w, "total_tokens", e->prompt_tokens + generated);
    mxd_json_close(w, '}');
}

static void put_response(const exchange *e, stage at, mxd_json_writer *w) {
    static const char *const absent[] = {"error", "instructions", "max_output_tokens", "previous_response_id"};
    mxd_json_open(w, '{');
    put_id(w, "id", "resp", e);
    put_text(w, "object", "response");
    put_whole(w, "created_at", (uint64_t)e->created);
    put_text(w, "status", status_at(e, at));
    put_text(w, "model", e->model);
    for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) put_null(w, absent[i]);
    mxd_json_name(w, "incomplete_details");
    if (at == ENDED && is_cut(e)) {
        mxd_json_open(w, '{');
        put_text(w, "reason", "max_output_tokens");
        mxd_json_close(w, '}');
    } else {
        mxd_json_put_null(w);
    }
    put_open(w, "output", '[');
    if (at == ENDED) put_item(e, at, w);
    mxd_json_close(w, ']');
    put_flag(w, "parallel_tool_calls", false);
    put_flag(w, "store", false);
    put_text(w, "tool_choice", "none");
    put_open(w, "tools", '[');
    mxd_json_close(w, ']');
    put_open(w, "metadata", '{');
    mxd_json_close(w, '}');
    put_whole(w, "seed", e->seed);
    if (at == ENDED) put_usage(e, w);
    mxd_json_close(w, '}');
}

/* ---- streams ---- */

enum { EVENTS_BEFORE = 4 }; /* the text */

static void open_event(const char *type, uint64_t number, mxd_json_writer *w) {
    char line[64];
    int length = snprintf(line, sizeof line, "event: %s\ndata: ", type);
    mxd_json_append(w, line, (size_t)length);
    w->comma = false;
    mxd_json_open(w, '{');
    put_text(w, "type", type);
    put_whole(w, "sequence_number", number);
}

static void close_event(mxd_json_writer *w) {
    mxd_json_close(w, '}');
    mxd_json_append(w, "\n\n", 2);
}

static void put_response_event(const exchange *e, const char *type, uint64_t number, stage at, mxd_json_writer *w) {
    open_event(type, number, w);
    mxd_json_name(w, "response");
    put_response(e, at, w);
    close_event(w);
}

static void put_item_event(const exchange *e, const char *type, uint64_t number, stage at, mxd_json_writer *w) {
    open_event(type, number, w);
    put_whole(w, "output_index", 0);
    mxd_json_name(w, "item");
    put_item(e, at, w);
    close_event(w);
}

/* Open an event about the text. */
static void open_text_event(const exchange *e, const char *type, uint64_t number, mxd_json_writer *w) {
    open_event(type, number, w);
    put_id(w, "item_id", "msg", e);
    put_whole(w, "output_index", 0);
    put_whole(w, "content_index", 0);
}

static void put_part_event(const exchange *e, const char *type, uint64_t number, stage at, mxd_json_writer *w) {
    open_text_event(e, type, number, w);
    mxd_json_name(w, "part");
    put_part(e, at, w);
    close_event(w);
}

static void begin_response(const exchange *e, mxd_json_writer *w) {
    put_response_event(e, "response.created", 0, BEGUN, w);
    put_response_event(e, "response.in_progress", 1, BEGUN, w);
    put_item_event(e, "response.output_item.added", 2, BEGUN, w);
    put_part_event(e, "response.content_part.added", 3, BEGUN, w);
}

static void piece_of_response(const exchange *e, const choice *h, mxd_json_writer *w) {
    if (h->news.text.length == 0) return;
    open_text_event(e, "response.output_text.delta", EVENTS_BEFORE + e->pieces, w);
    put_string(w, "delta", h->news.text.data, h->news.text.length);
    put_open(w, "logprobs", '[');
    mxd_json_close(w, ']');
    close_event(w);
}

static void end_response(const exchange *e, mxd_json_writer *w) {
    const text_buffer *text = &e->choices[0].text;
    uint64_t number = EVENTS_BEFORE + e->pieces;
    open_text_event(e, "response.output_text.done", number, w);
    put_string(w, "text", text->data, text->length);
    put_open(w, "logprobs", '[');
    mxd_json_close(w, ']');
    close_event(w);
    put_part_event(e, "response.content_part.done", number + 1, ENDED, w);
    put_item_event(e, "response.output_item.done", number + 2, ENDED, w);
    put_response_event(e, is_cut(e) ? "response.incomplete" : "response.completed", number + 3, ENDED, w);
}

static void put_fault(const exchange *e, const char *message, mxd_json_writer *w) {
    open_event("error", EVENTS_BEFORE + e->pieces, w);
    put_text(w, "code", "generation_failed");
    put_text(w, "message", message);
    put_null(w, "param");
    close_event(w);
}

static void whole_response(const exchange *e, mxd_json_writer *w) {
    put_response(e, ENDED, w);
}

static const dialect response_dialect = {.type = "text/event-stream",
                                         .keeps_text = true,
                                         .begin = begin_response,
                                         .piece = piece_of_response,
                                         .end = end_response,
                                         .whole = whole_response,
                                         .fault = put_fault,
                                         .error = openai_error};

/* ---- requests ---- */

static bool refuse_member(ask *a, const char *name, const char *reason) {
    refuse(a->server, a->connection, a->dialect, 400, "unsupported", "'%s': %s", name, reason);
    return false;
}

/* Refuse what needs answers that are kept, or tools that are called. */
static bool check_supported(ask *a) {
    static const char *const kept[] = {"previous_response_id", "conversation", "prompt"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (ask_member(a, 0, kept[i]))
            return refuse_member(a, kept[i], "nothing is kept here: send the whole conversation as 'input'");
    bool background = false;
    if (!ask_flag(a, 0, "background", &background)) return false;
    if (background) return refuse_member(a, "background", "answers are not kept");
    uint32_t choice = ask_member(a, 0, "tool_choice");
    if (choice && !mxd_json_equals(&a->json, choice, "auto") && !mxd_json_equals(&a->json, choice, "none"))
        return refuse_member(a, "tool_choice", "demanded calls are served by /v1/chat/completions only");
    return true;
}

/* Read text.format. */
static bool ask_format(ask *a) {
    static const char name[] = "text.format";
    uint32_t text = ask_member(a, 0, "text"), format = text ? ask_member(a, text, "format") : 0;
    uint32_t type = format ? mxd_json_get(&a->json, format, "type") : 0;
    if (!format || mxd_json_equals(&a->json, type, "text")) return true;
    if (mxd_json_equals(&a->json, type, "json_object")) return ask_schema(a, 0, name);
    if (!mxd_json_equals(&a->json, type, "json_schema"))
        return refuse_member(a, name, "its type has to be text, json_object or json_schema");
    uint32_t schema = ask_member(a, format, "schema");
    return schema ? ask_schema(a, schema, name) : refuse_member(a, name, "schema is missing");
}

/* Read the conversation: instructions, and a text or a list of messages. */
static bool ask_input(ask *a) {
    uint32_t instructions = ask_member(a, 0, "instructions"), input = ask_member(a, 0, "input");
    if (instructions && !ask_message(a, "system", instructions)) return false;
    if (!input) return refuse_member(a, "input", "it has to be a string or an array");
    if (mxd_json_is(&a->json, input, MXD_JSON_STRING)) return ask_message(a, "user", input);
    for (uint32_t i = mxd_json_first(&a->json, input); i; i = mxd_json_next(&a->json, input, i)) {
        const char *type = "message";
        if (!mxd_json_is(&a->json, i, MXD_JSON_OBJECT)) break; /* ask_messages() names it */
        if (!ask_text(a, i, "type", &type)) return false;
        if (strcmp(type, "message")) return refuse_member(a, "input", "only items of type 'message' are read");
    }
    return ask_messages(a, input, "input");
}

void openai_responses(server *s, connection *c) {
    ask a;
    if (ask_open(&a, s, c, &response_dialect) && check_supported(&a) && ask_sampling(&a, 0) &&
        ask_limit(&a, 0, "max_output_tokens") && ask_flag(&a, 0, "stream", &a.wish.streamed) && ask_format(&a) &&
        ask_input(&a) && ask_encode_chat(&a))
        ask_begin(&a);
    ask_free(&a);
}
