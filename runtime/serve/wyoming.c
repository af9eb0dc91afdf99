/* SPDX-License-Identifier: Apache-2.0 */
#include "wyoming.h"

#include <string.h>

#include "exchange.h"
#include "put.h"
#include "request.h"

static const char PROTOCOL[] = "1.5.2"; /* of the events that are spoken */

/* ---- words ---- */

static void open_event(const char *type, mxd_json_writer *w) {
    mxd_json_open(w, '{');
    put_text(w, "type", type);
    put_text(w, "version", PROTOCOL);
    put_open(w, "data", '{');
}

static void close_event(mxd_json_writer *w) {
    mxd_json_close(w, '}');
    mxd_json_close(w, '}');
    mxd_json_append(w, "\n", 1);
}

static void whole_answer(const exchange *e, mxd_json_writer *w) {
    const text_buffer *text = &e->choices[0].text;
    open_event("handled", w);
    put_string(w, "text", text->data, text->length);
    close_event(w);
}

static void put_error(int status, const char *message, const char *code, mxd_json_writer *w) {
    (void)status;
    (void)code;
    open_event("not-handled", w);
    put_text(w, "text", message);
    close_event(w);
}

static const dialect wyoming_dialect = {.whole = whole_answer, .error = put_error};

static void put_attribution(mxd_json_writer *w) {
    put_open(w, "attribution", '{');
    put_text(w, "name", "mxdraft");
    put_text(w, "url", "");
    mxd_json_close(w, '}');
    put_flag(w, "installed", true);
    put_text(w, "version", mxd_version());
}

/* Answer `describe`: this is a handler of sentences and nothing else. */
static void answer_describe(server *s, connection *c) {
    static const char *const others[] = {"asr", "tts", "intent", "wake", "mic", "snd"};
    mxd_json_writer w;
    mxd_json_writer_init(&w, BODY_BYTES);
    open_event("info", &w);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        put_open(&w, others[i], '[');
        mxd_json_close(&w, ']');
    }
    put_open(&w, "handle", '[');
    mxd_json_open(&w, '{');
    put_text(&w, "name", "mxdraft");
    put_text(&w, "description", "A language model on this device");
    put_attribution(&w);
    put_open(&w, "models", '[');
    mxd_json_open(&w, '{');
    put_text(&w, "name", s->model_name);
    put_text(&w, "description", s->model_name);
    put_attribution(&w);
    put_open(&w, "languages", '[');
    mxd_json_put_text(&w, "en");
    mxd_json_close(&w, ']');
    mxd_json_close(&w, '}');
    mxd_json_close(&w, ']');
    mxd_json_close(&w, '}');
    mxd_json_close(&w, ']');
    close_event(&w);
    respond(s, c, 200, "", w.data, w.len);
    mxd_json_writer_free(&w);
}

/* ---- events ---- */

/* Answer the sentence data.text of a document. */
static void answer_transcript(server *s, connection *c, const char *json, size_t length, const char *within) {
    ask a;
    bool taken = ask_open_text(&a, s, c, &wyoming_dialect, json, length);
    uint32_t data = taken && within ? ask_member(&a, 0, within) : 0;
    const char *text = NULL;
    taken = taken && (!within || data) && ask_text(&a, data, "text", &text);
    if (taken && !text) refuse(s, c, &wyoming_dialect, 400, NULL, "the transcript has no text");
    else if (taken && ask_message(&a, "user", mxd_json_get(&a.json, data, "text")) && ask_encode_chat(&a))
        ask_begin(&a);
    ask_free(&a);
}

static void answer_ping(server *s, connection *c) {
    mxd_json_writer w;
    mxd_json_writer_init(&w, BODY_BYTES);
    open_event("pong", &w);
    close_event(&w);
    respond(s, c, 200, "", w.data, w.len);
    mxd_json_writer_free(&w);
}

/* Read a length of the head; false if it is none. */
static bool read_length(const mxd_json *head, const char *name, size_t *out) {
    int64_t value = 0;
    uint32_t found = mxd_json_get(head, 0, name);
    if (found && !mxd_json_is(head, found, MXD_JSON_NULL) &&
        (!mxd_json_integer(head, found, &value) || value < 0 || value > BODY_BYTES))
        return false;
    *out = (size_t)value;
    return true;
}

static void give_up(connection *c) {
    c->busy = c->close_after = true;
}

void wyoming_take(server *s, connection *c) {
    const char *end = memchr(c->in.data, '\n', c->in.length);
    size_t length = end ? (size_t)(end - c->in.data) : c->in.length, data, payload;
    mxd_json head;
    mxd_error error;
    if (length >= HTTP_HEAD_BYTES || (end && mxd_json_parse(c->in.data, length, &head, &error))) {
        give_up(c);
        return;
    }
    if (!end) return;
    uint32_t type = mxd_json_is(&head, 0, MXD_JSON_OBJECT) ? mxd_json_get(&head, 0, "type") : 0;
    if (!type || !read_length(&head, "data_length", &data) || !read_length(&head, "payload_length", &payload) ||
        data + payload > BODY_BYTES) {
        give_up(c);
    } else if (c->in.length >= length + 1 + data + payload) {
        const char *json = data > 0 ? end + 1 : c->in.data;
        c->request.head_bytes = length + 1;
        c->request.body_bytes = data + payload;
        c->busy = true;
        s->requests++;
        if (mxd_json_equals(&head, type, "transcript"))
            answer_transcript(s, c, json, data > 0 ? data : length, data > 0 ? NULL : "data");
        else if (mxd_json_equals(&head, type, "describe")) answer_describe(s, c);
        else if (mxd_json_equals(&head, type, "ping")) answer_ping(s, c);
    }
    mxd_json_free(&head);
}
