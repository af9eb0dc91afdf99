/* SPDX-License-Identifier: Apache-2.0 */
#include "openai.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "logprobs.h"
#include "put.h"
#include "request.h"
#include "tool_calls.h"

/* ---- what both kinds of answer share ---- */

void openai_error(int status, const char *message, const char *code, mxd_json_writer *w) {
    mxd_json_open(w, '{');
    put_open(w, "error", '{');
    put_text(w, "message", message);
    put_text(w, "type",
             status == 401   ? "authentication_error"
             : status >= 500 ? "server_error"
                             : "invalid_request_error");
    put_null(w, "param");
    mxd_json_name(w, "code");
    if (code) mxd_json_put_text(w, code);
    else mxd_json_put_null(w);
    mxd_json_close(w, '}');
    mxd_json_close(w, '}');
}

static void open_event(mxd_json_writer *w) {
    mxd_json_append(w, "data: ", 6);
    w->comma = false;
}

static void close_event(mxd_json_writer *w) {
    mxd_json_append(w, "\n\n", 2);
}

static void put_fault(const exchange *e, const char *message, mxd_json_writer *w) {
    (void)e;
    open_event(w);
    openai_error(500, message, "generation_failed", w);
    close_event(w);
}

/* Open an answer up to its choices. */
static void open_answer(const exchange *e, const char *prefix, const char *object, mxd_json_writer *w) {
    char id[ID_BYTES + 16];
    snprintf(id, sizeof id, "%s-%s", prefix, e->id);
    mxd_json_open(w, '{');
    put_text(w, "id", id);
    put_text(w, "object", object);
    put_whole(w, "created", e->created);
    put_text(w, "model", e->model);
    put_open(w, "choices", '[');
}

static void put_usage(const exchange *e, mxd_json_writer *w) {
    uint64_t generated = exchange_generated(e);
    put_open(w, "usage", '{');
    put_whole(w, "prompt_tokens", e->prompt_tokens);
    put_whole(w, "completion_tokens", generated);
    put_whole(w, "total_tokens", e->prompt_tokens + generated);
    put_open(w, "prompt_tokens_details", '{');
    put_whole(w, "cached_tokens", exchange_cached(e));
    mxd_json_close(w, '}');
    mxd_json_close(w, '}');
}

static void put_finish(const exchange *e, const choice *h, mxd_json_writer *w) {
    mxd_stop stop = h->news.stop;
    mxd_json_name(w, "finish_reason");
    if (!h->done) mxd_json_put_null(w);
    else if (is_tool_call(e, h)) mxd_json_put_text(w, "tool_calls");
    else mxd_json_put_text(w, stop == MXD_STOP_LIMIT || stop == MXD_STOP_CONTEXT ? "length" : "stop");
}

/* Put what only this server tells: who drafted the bytes of the piece, and at the end what the run was like. */
static void put_origins(const exchange *e, const choice *h, mxd_json_writer *w) {
    const mxd_stats *t = &h->news.stats;
    if (!e->with_origins) return;
    put_open(w, "mxdraft", '{');
    put_string(w, "origins", h->news.origins.data, h->news.origins.length);
    if (h->done) {
        put_whole(w, "seed", e->seed + h->index);
        put_whole(w, "cached_tokens", h->news.cached);
        put_whole(w, "generated_tokens", t->generated_tokens);
        put_whole(w, "drafted", t->drafted);
        put_whole(w, "accepted", t->accepted);
        put_number(w, "first_token_s", t->first_token_s);
        put_number(w, "tokens_per_second", t->decode_tok_per_s);
    }
    mxd_json_close(w, '}');
}

static void put_end(mxd_json_writer *w) {
    mxd_json_append(w, "data: [DONE]\n\n", 14);
}

/* End a stream; `prefix` and `object` are those of its pieces. */
static void end_stream(const exchange *e, const char *prefix, const char *object, mxd_json_writer *w) {
    if (e->with_usage) {
        open_event(w);
        open_answer(e, prefix, object, w);
        mxd_json_close(w, ']');
        put_usage(e, w);
        mxd_json_close(w, '}');
        close_event(w);
    }
    put_end(w);
}

/* ---- chat ---- */

static void open_chunk(const exchange *e, uint32_t index, mxd_json_writer *w) {
    open_event(w);
    open_answer(e, "chatcmpl", "chat.completion.chunk", w);
    mxd_json_open(w, '{');
    put_whole(w, "index", index);
    put_open(w, "delta", '{');
}

static void close_chunk(mxd_json_writer *w) {
    mxd_json_close(w, '}');
    close_event(w);
}

static void begin_chat(const exchange *e, mxd_json_writer *w) {
    for (uint32_t i = 0; i < e->count; i++) {
        open_chunk(e, i, w);
        put_text(w, "role", "assistant");
        put_text(w, "content", "");
        mxd_json_close(w, '}');
        put_null(w, "finish_reason");
        mxd_json_close(w, '}');
        mxd_json_close(w, ']');
        close_chunk(w);
    }
}

static void piece_of_chat(const exchange *e, const choice *h, mxd_json_writer *w) {
    const text_buffer *text = e->calls_tool ? &h->text : &h->news.text;
    const text_buffer *told = e->calls_tool ? &h->told : &h->news.told;
    if (!h->done && (text->length + told->length == 0 || e->calls_tool)) return;
    open_chunk(e, h->index, w);
    if (is_tool_call(e, h)) put_tool_call(e, h, true, w);
    else if (text->length > 0) put_string(w, "content", text->data, text->length);
    mxd_json_close(w, '}');
    if (e->told) put_chat_logprobs(e, told, w);
    put_finish(e, h, w);
    mxd_json_close(w, '}');
    mxd_json_close(w, ']');
    put_origins(e, h, w);
    close_chunk(w);
}

static void end_chat(const exchange *e, mxd_json_writer *w) {
    end_stream(e, "chatcmpl", "chat.completion.chunk", w);
}

static void whole_chat(const exchange *e, mxd_json_writer *w) {
    open_answer(e, "chatcmpl", "chat.completion", w);
    for (uint32_t i = 0; i < e->count; i++) {
        const choice *h = &e->choices[i];
        mxd_json_open(w, '{');
        put_whole(w, "index", i);
        put_open(w, "message", '{');
        put_text(w, "role", "assistant");
        if (is_tool_call(e, h)) {
            put_null(w, "content");
            put_tool_call(e, h, false, w);
        } else {
            put_string(w, "content", h->text.data, h->text.length);
        }
        put_null(w, "refusal");
        mxd_json_close(w, '}');
        put_chat_logprobs(e, &h->told, w);
        put_finish(e, h, w);
        mxd_json_close(w, '}');
    }
    mxd_json_close(w, ']');
    put_usage(e, w);
    put_whole(w, "seed", e->seed);
    mxd_json_close(w, '}');
}

const dialect openai_chat_dialect = {.type = "text/event-stream",
                                     .begin = begin_chat,
                                     .piece = piece_of_chat,
                                     .end = end_chat,
                                     .whole = whole_chat,
                                     .fault = put_fault,
                                     .error = openai_error};

/* ---- completions ---- */

static void piece_of_completion(const exchange *e, const choice *h, mxd_json_writer *w) {
    const text_buffer *text = &h->news.text;
    if (text->length + h->news.told.length == 0 && !h->done) return;
    open_event(w);
    open_answer(e, "cmpl", "text_completion", w);
    mxd_json_open(w, '{');
    put_whole(w, "index", h->index);
    put_string(w, "text", text->data, text->length);
    put_completion_logprobs(e, &h->news.told, h->characters, w);
    put_finish(e, h, w);
    mxd_json_close(w, '}');
    mxd_json_close(w, ']');
    put_origins(e, h, w);
    mxd_json_close(w, '}');
    close_event(w);
}

static void end_completion(const exchange *e, mxd_json_writer *w) {
    end_stream(e, "cmpl", "text_completion", w);
}

static void whole_completion(const exchange *e, mxd_json_writer *w) {
    open_answer(e, "cmpl", "text_completion", w);
    for (uint32_t i = 0; i < e->count; i++) {
        const choice *h = &e->choices[i];
        mxd_json_open(w, '{');
        put_whole(w, "index", i);
        put_string(w, "text", h->text.data, h->text.length);
        put_completion_logprobs(e, &h->told, 0, w);
        put_finish(e, h, w);
        mxd_json_close(w, '}');
    }
    mxd_json_close(w, ']');
    put_usage(e, w);
    put_whole(w, "seed", e->seed);
    mxd_json_close(w, '}');
}

static const dialect completion_dialect = {.type = "text/event-stream",
                                           .piece = piece_of_completion,
                                           .end = end_completion,
                                           .whole = whole_completion,
                                           .fault = put_fault,
                                           .error = openai_error};

/* ---- requests ---- */

static bool refuse_member(ask *a, const char *name, const char *reason) {
    refuse(a->server, a->connection, a->dialect, 400, "unsupported", "'%s': %s", name, reason);
    return false;
}

/* Read response_format: text, json_object (also with a schema, as llama.cpp's server takes it) or json_schema. */
static bool ask_format(ask *a) {
    static const char name[] = "response_format";
    uint32_t format = ask_member(a, 0, name), type = mxd_json_get(&a->json, format, "type");
    if (!format || mxd_json_equals(&a->json, type, "text")) return true;
    if (mxd_json_equals(&a->json, type, "json_object")) return ask_schema(a, ask_member(a, format, "schema"), name);
    if (!mxd_json_equals(&a->json, type, "json_schema"))
        return refuse_member(a, name, "its type has to be text, json_object or json_schema");
    uint32_t outer = ask_member(a, format, "json_schema"), schema = outer ? ask_member(a, outer, "schema") : 0;
    return schema ? ask_schema(a, schema, name) : refuse_member(a, name, "json_schema.schema is missing");
}

/* Read what chat and completions share. */
static bool ask_common(ask *a) {
    int64_t choices = 1;
    bool extended = false;
    uint32_t options = ask_member(a, 0, "stream_options");
    if (!ask_sampling(a, 0) || !ask_limit(a, 0, "max_tokens") || !ask_limit(a, 0, "max_completion_tokens") ||
        !ask_whole(a, 0, "n", 1, MOST_CHOICES, &choices) || !ask_flag(a, 0, "stream", &a->wish.streamed) ||
        !ask_flag(a, 0, "mxdraft", &extended))
        return false;
    if (options && !ask_flag(a, options, "include_usage", &a->wish.with_usage)) return false;
    a->wish.choices = (uint32_t)choices;
    a->wish.with_origins = extended;
    return ask_format(a);
}

void openai_chat(server *s, connection *c) {
    ask a;
    if (ask_open(&a, s, c, &openai_chat_dialect) && ask_common(&a) && ask_chat_logprobs(&a) && ask_tool_choice(&a) &&
        ask_messages(&a, mxd_json_get(&a.json, 0, "messages"), "messages") && ask_encode_chat(&a))
        ask_begin(&a);
    ask_free(&a);
}

/* Read the prompt: a string, or an array with one. */
static bool ask_prompt(ask *a) {
    size_t length;
    uint32_t prompt = ask_member(a, 0, "prompt");
    if (prompt && mxd_json_is(&a->json, prompt, MXD_JSON_ARRAY) && a->json.nodes[prompt].len == 1)
        prompt = mxd_json_first(&a->json, prompt);
    if (!prompt || !mxd_json_is(&a->json, prompt, MXD_JSON_STRING))
        return refuse_member(a, "prompt", "it has to be one string");
    const char *text = mxd_json_text(&a->json, prompt, &length);
    return ask_encode_text(a, text, length);
}

void openai_completions(server *s, connection *c) {
    ask a;
    if (ask_open(&a, s, c, &completion_dialect) && ask_common(&a) && ask_completion_logprobs(&a) && ask_prompt(&a))
        ask_begin(&a);
    ask_free(&a);
}

void openai_models(server *s, connection *c) {
    mxd_json_writer w;
    mxd_json_writer_init(&w, 65536);
    mxd_json_open(&w, '{');
    put_text(&w, "object", "list");
    put_open(&w, "data", '[');
    mxd_json_open(&w, '{');
    put_text(&w, "id", s->model_name);
    put_text(&w, "object", "model");
    put_whole(&w, "created", s->model_time);
    put_text(&w, "owned_by", "mxdraft");
    put_open(&w, "meta", '{');
    put_whole(&w, "n_ctx", s->plan->ctx);
    put_whole(&w, "n_ctx_train", s->info.max_positions);
    put_whole(&w, "n_vocab", s->info.vocab);
    put_whole(&w, "n_embd", s->info.hidden);
    put_whole(&w, "size", s->info.file_bytes);
    mxd_json_close(&w, '}');
    mxd_json_close(&w, '}');
    mxd_json_close(&w, ']');
    mxd_json_close(&w, '}');
    respond(s, c, 200, "application/json", w.data, w.len);
    mxd_json_writer_free(&w);
}
