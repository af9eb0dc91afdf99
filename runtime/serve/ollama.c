/* SPDX-License-Identifier: Apache-2.0 */
#include "ollama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "put.h"
#include "request.h"

enum { LIST_BYTES = 65536, DATE_BYTES = 32 };
static const char API_VERSION[] = "0.9.0"; /* of the API that is spoken; clients compare numbers */

/* ---- words ---- */

static void put_time(mxd_json_writer *w, const char *name, int64_t seconds) {
    char text[DATE_BYTES];
    time_t when = (time_t)seconds;
    struct tm utc;
    gmtime_r(&when, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    put_text(w, name, text);
}

static void put_error(int status, const char *message, const char *code, mxd_json_writer *w) {
    (void)status;
    (void)code;
    mxd_json_open(w, '{');
    put_text(w, "error", message);
    mxd_json_close(w, '}');
}

static void put_line_end(mxd_json_writer *w) {
    mxd_json_append(w, "\n", 1);
    w->comma = false;
}

static void put_fault(const exchange *e, const char *message, mxd_json_writer *w) {
    (void)e;
    put_error(500, message, NULL, w);
    put_line_end(w);
}

static uint64_t nanoseconds(double seconds) {
    return seconds > 0 ? (uint64_t)(seconds * 1e9) : 0;
}

/* Put what ends an answer. */
static void put_summary(const exchange *e, const choice *h, mxd_json_writer *w) {
    const mxd_stats *t = &h->news.stats;
    mxd_stop stop = h->news.stop;
    put_text(w, "done_reason", stop == MXD_STOP_LIMIT || stop == MXD_STOP_CONTEXT ? "length" : "stop");
    put_whole(w, "total_duration", nanoseconds(clock_seconds() - e->started));
    put_whole(w, "load_duration", 0);
    put_whole(w, "prompt_eval_count", e->prompt_tokens);
    put_whole(w, "prompt_eval_duration", nanoseconds(t->prefill_s));
    put_whole(w, "eval_count", h->news.tokens);
    put_whole(w, "eval_duration", nanoseconds(t->decode_s));
}

/* Put an object with a piece of text, or all of it. */
static void put_answer(const exchange *e, const choice *h, bool chat, const text_buffer *text, mxd_json_writer *w) {
    mxd_json_open(w, '{');
    put_text(w, "model", e->model);
    put_time(w, "created_at", e->created);
    if (chat) {
        put_open(w, "message", '{');
        put_text(w, "role", "assistant");
        put_string(w, "content", text->data, text->length);
        mxd_json_close(w, '}');
    } else {
        put_string(w, "response", text->data, text->length);
    }
    put_flag(w, "done", h->done);
    if (h->done) put_summary(e, h, w);
    mxd_json_close(w, '}');
}

static void put_piece(const exchange *e, const choice *h, bool chat, mxd_json_writer *w) {
    if (h->news.text.length == 0 && !h->done) return;
    put_answer(e, h, chat, &h->news.text, w);
    put_line_end(w);
}

static void piece_of_chat(const exchange *e, const choice *h, mxd_json_writer *w) {
    put_piece(e, h, true, w);
}

static void piece_of_text(const exchange *e, const choice *h, mxd_json_writer *w) {
    put_piece(e, h, false, w);
}

static void whole_chat(const exchange *e, mxd_json_writer *w) {
    put_answer(e, &e->choices[0], true, &e->choices[0].text, w);
}

static void whole_text(const exchange *e, mxd_json_writer *w) {
    put_answer(e, &e->choices[0], false, &e->choices[0].text, w);
}

static const dialect chat_dialect = {.type = "application/x-ndjson",
                                     .piece = piece_of_chat,
                                     .whole = whole_chat,
                                     .fault = put_fault,
                                     .error = put_error};
static const dialect text_dialect = {.type = "application/x-ndjson",
                                     .piece = piece_of_text,
                                     .whole = whole_text,
                                     .fault = put_fault,
                                     .error = put_error};

/* ---- generating ---- */

/* Tell whether `model` is the one that is served, with or without a tag. */
static bool names_model(const server *s, const char *model) {
    size_t length = strlen(s->model_name);
    return !strncmp(model, s->model_name, length) && (model[length] == '\0' || !strcmp(model + length, ":latest"));
}

/* Read what chat and generate share. num_ctx is not looked at: the context is the server's, and what does not fit it is
 * refused. */
static bool ask_common(ask *a) {
    const char *model = NULL;
    a->wish.streamed = true;
    if (!ask_text(a, 0, "model", &model) || !ask_flag(a, 0, "stream", &a->wish.streamed)) return false;
    if (model && !names_model(a->server, model)) {
        refuse(a->server, a->connection, a->dialect, 404, NULL, "model '%.64s' not found", model);
        return false;
    }
    uint32_t format = ask_member(a, 0, "format"), options = ask_member(a, 0, "options");
    if (options && (!ask_sampling(a, options) || !ask_limit(a, options, "num_predict"))) return false;
    if (!format || mxd_json_equals(&a->json, format, "")) return true;
    return ask_schema(a, mxd_json_equals(&a->json, format, "json") ? 0 : format, "format");
}

void ollama_chat(server *s, connection *c) {
    ask a;
    if (ask_open(&a, s, c, &chat_dialect) && ask_common(&a) &&
        ask_messages(&a, mxd_json_get(&a.json, 0, "messages"), "messages") && ask_encode_chat(&a))
        ask_begin(&a);
    ask_free(&a);
}

/* Encode the prompt as one message, or as it is if it is raw. */
static bool ask_prompt(ask *a) {
    bool raw = false;
    const char *text = "";
    uint32_t system = ask_member(a, 0, "system");
    if (!ask_flag(a, 0, "raw", &raw) || !ask_text(a, 0, "prompt", &text)) return false;
    if (raw) return ask_encode_text(a, text, strlen(text));
    if (system && !mxd_json_equals(&a->json, system, "") && !ask_message(a, "system", system)) return false;
    return ask_message(a, "user", mxd_json_get(&a->json, 0, "prompt")) && ask_encode_chat(a);
}

void ollama_generate(server *s, connection *c) {
    ask a;
    if (ask_open(&a, s, c, &text_dialect) && ask_common(&a) && ask_prompt(&a)) ask_begin(&a);
    ask_free(&a);
}

/* ---- lists ---- */

static void send(server *s, connection *c, mxd_json_writer *w) {
    respond(s, c, 200, "application/json", w->data, w->len);
    mxd_json_writer_free(w);
}

void ollama_version(server *s, connection *c) {
    mxd_json_writer w;
    mxd_json_writer_init(&w, LIST_BYTES);
    mxd_json_open(&w, '{');
    put_text(&w, "version", API_VERSION);
    mxd_json_close(&w, '}');
    send(s, c, &w);
}

static void put_details(const server *s, mxd_json_writer *w) {
    put_open(w, "details", '{');
    put_text(w, "parent_model", "");
    put_text(w, "format", "mxb");
    put_text(w, "family", "llama");
    put_open(w, "families", '[');
    mxd_json_put_text(w, "llama");
    mxd_json_close(w, ']');
    put_text(w, "parameter_size", "");
    put_text(w, "quantization_level", s->info.has_residual ? "MXFP4+residual" : "MXFP4");
    mxd_json_close(w, '}');
}

/* Answer with a list of the one model; `loaded` adds what /api/ps tells. */
static void send_models(server *s, connection *c, bool loaded) {
    mxd_json_writer w;
    mxd_json_writer_init(&w, LIST_BYTES);
    mxd_json_open(&w, '{');
    put_open(&w, "models", '[');
    mxd_json_open(&w, '{');
    put_text(&w, "name", s->model_name);
    put_text(&w, "model", s->model_name);
    put_time(&w, "modified_at", s->model_time);
    put_whole(&w, "size", loaded ? s->plan->total : s->info.file_bytes);
    put_text(&w, "digest", "");
    put_details(s, &w);
    if (loaded) {
        put_text(&w, "expires_at", "2999-01-01T00:00:00Z"); /* it stays */
        put_whole(&w, "size_vram", 0);
        put_whole(&w, "context_length", s->plan->ctx);
    }
    mxd_json_close(&w, '}');
    mxd_json_close(&w, ']');
    mxd_json_close(&w, '}');
    send(s, c, &w);
}

void ollama_tags(server *s, connection *c) {
    send_models(s, c, false);
}

void ollama_ps(server *s, connection *c) {
    send_models(s, c, true);
}

void ollama_show(server *s, connection *c) {
    mxd_json_writer w;
    mxd_json_writer_init(&w, LIST_BYTES);
    mxd_json_open(&w, '{');
    put_time(&w, "modified_at", s->model_time);
    put_details(s, &w);
    put_open(&w, "model_info", '{');
    put_text(&w, "general.architecture", "llama");
    put_whole(&w, "llama.context_length", s->plan->ctx);
    put_whole(&w, "llama.embedding_length", s->info.hidden);
    put_whole(&w, "llama.block_count", s->info.layers);
    mxd_json_close(&w, '}');
    put_open(&w, "capabilities", '[');
    mxd_json_put_text(&w, "completion");
    mxd_json_close(&w, ']');
    mxd_json_close(&w, '}');
    send(s, c, &w);
}

void ollama_pull(server *s, connection *c) {
    static const char body[] = "{\"status\":\"success\"}\n";
    respond(s, c, 200, "application/x-ndjson", body, sizeof body - 1);
}
