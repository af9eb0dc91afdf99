/* SPDX-License-Identifier: Apache-2.0 */
#include "request.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "../src/sampler.h"

#define REFUSE(a, ...) (refuse((a)->server, (a)->connection, (a)->dialect, 400, NULL, __VA_ARGS__), false)

static bool refuse_error(ask *a, const mxd_error *error) {
    return REFUSE(a, "%s", error->message);
}

bool ask_open(ask *a, server *s, connection *c, const dialect *d) {
    return ask_open_text(a, s, c, d, c->in.data + c->request.head_bytes, c->request.body_bytes);
}

bool ask_open_text(ask *a, server *s, connection *c, const dialect *d, const char *text, size_t length) {
    const settings *set = s->settings;
    mxd_error error;
    *a = (ask){.server = s, .connection = c, .dialect = d};
    a->wish.choices = 1;
    mxd_sampling_default(&a->wish.sampling);
    a->wish.sampling.temperature = (float)set->temp;
    a->wish.sampling.top_k = (uint32_t)set->top_k;
    a->wish.sampling.top_p = (float)set->top_p;
    a->wish.sampling.min_p = (float)set->min_p;
    a->wish.sampling.repeat_penalty = (float)set->repeat_penalty;
    a->wish.sampling.seed = set->seeded ? set->seed : random_bits() & UINT32_MAX; /* short enough to type */
    a->wish.sampling.ignore_eos = set->ignore_eos;
    a->wish.sampling.stop_count = (uint32_t)set->stop_count;
    memcpy(a->wish.stops, set->stops, set->stop_count * sizeof *set->stops);
    if (mxd_json_parse(text, length, &a->json, &error)) return REFUSE(a, "the body is not JSON: %s", error.message);
    if (!mxd_json_is(&a->json, 0, MXD_JSON_OBJECT)) return REFUSE(a, "the body is not a JSON object");
    return true;
}

void ask_free(ask *a) {
    for (size_t i = 0; i < a->message_count; i++) free((void *)a->messages[i].content);
    free(a->messages);
    for (uint32_t i = 0; i < MOST_CHOICES; i++) mxd_grammar_free(&a->wish.grammars[i]);
    free(a->wish.ids);
    mxd_json_free(&a->json);
}

/* ---- members ---- */

uint32_t ask_member(const ask *a, uint32_t node, const char *name) {
    uint32_t found = mxd_json_get(&a->json, node, name);
    return found && !mxd_json_is(&a->json, found, MXD_JSON_NULL) ? found : 0;
}

bool ask_number(ask *a, uint32_t node, const char *name, double low, double high, double *out) {
    double value;
    uint32_t found = ask_member(a, node, name);
    if (!found) return true;
    if (!mxd_json_double(&a->json, found, &value) || !(value >= low && value <= high))
        return REFUSE(a, "'%s' has to be a number from %g to %g", name, low, high);
    *out = value;
    return true;
}

bool ask_whole(ask *a, uint32_t node, const char *name, int64_t low, int64_t high, int64_t *out) {
    int64_t value;
    uint32_t found = ask_member(a, node, name);
    if (!found) return true;
    if (!mxd_json_integer(&a->json, found, &value) || value < low || value > high)
        return REFUSE(a, "'%s' has to be a whole number from %" PRId64 " to %" PRId64, name, low, high);
    *out = value;
    return true;
}

bool ask_flag(ask *a, uint32_t node, const char *name, bool *out) {
    uint32_t found = ask_member(a, node, name);
    if (!found) return true;
    *out = mxd_json_is(&a->json, found, MXD_JSON_TRUE);
    if (!*out && !mxd_json_is(&a->json, found, MXD_JSON_FALSE)) return REFUSE(a, "'%s' has to be true or false", name);
    return true;
}

/* Return a string's text as C reads it; NULL, and refuse the request, if it is none or holds a NUL. */
static const char *plain_text(ask *a, uint32_t node, const char *name) {
    size_t length;
    const char *text = mxd_json_is(&a->json, node, MXD_JSON_STRING) ? mxd_json_text(&a->json, node, &length) : NULL;
    if (!text) (void)REFUSE(a, "'%s' has to be a string", name);
    else if (strlen(text) == length) return text;
    else (void)REFUSE(a, "'%s' holds a NUL character at byte %zu", name, strlen(text));
    return NULL;
}

bool ask_text(ask *a, uint32_t node, const char *name, const char **out) {
    uint32_t found = ask_member(a, node, name);
    if (!found) return true;
    const char *text = plain_text(a, found, name);
    if (text) *out = text;
    return text;
}

/* ---- sampling ---- */

static bool add_stop(ask *a, uint32_t node) {
    wish *w = &a->wish;
    const char *text = plain_text(a, node, "stop");
    if (!text) return false;
    if (w->sampling.stop_count == MAX_STOPS) return REFUSE(a, "'stop' has more than %d strings", MAX_STOPS);
    if (strlen(text) < 1 || strlen(text) > 256) return REFUSE(a, "a string of 'stop' has to have 1 to 256 bytes");
    w->stops[w->sampling.stop_count++] = text;
    return true;
}

static bool ask_stop(ask *a, uint32_t node) {
    uint32_t stop = ask_member(a, node, "stop");
    if (!stop) return true;
    a->wish.sampling.stop_count = 0; /* in place of the server's own */
    if (!mxd_json_is(&a->json, stop, MXD_JSON_ARRAY)) return add_stop(a, stop);
    for (uint32_t i = mxd_json_first(&a->json, stop); i; i = mxd_json_next(&a->json, stop, i))
        if (!add_stop(a, i)) return false;
    return true;
}

bool ask_sampling(ask *a, uint32_t node) {
    mxd_sampling *p = &a->wish.sampling;
    double temperature = (double)p->temperature, top_p = (double)p->top_p, min_p = (double)p->min_p;
    double penalty = (double)p->repeat_penalty, presence = 0, frequency = 0;
    int64_t top_k = p->top_k, seed = (int64_t)p->seed;
    if (!ask_number(a, node, "temperature", 0, 100, &temperature) || !ask_number(a, node, "top_p", 0, 1, &top_p) ||
        !ask_number(a, node, "min_p", 0, 1, &min_p) || !ask_number(a, node, "repeat_penalty", 0.1, 10, &penalty) ||
        !ask_number(a, node, "presence_penalty", -2, 2, &presence) ||
        !ask_number(a, node, "frequency_penalty", -2, 2, &frequency) ||
        !ask_whole(a, node, "top_k", -1, UINT32_MAX, &top_k) ||
        !ask_whole(a, node, "seed", INT64_MIN, INT64_MAX, &seed) || !ask_stop(a, node))
        return false;
    p->temperature = temperature > 0 && temperature < 1e-4 ? 0 : (float)temperature; /* the library's least is 1e-4 */
    p->top_p = (float)top_p;
    p->min_p = (float)min_p;
    p->repeat_penalty = (float)penalty;
    p->presence_penalty = (float)presence;
    p->frequency_penalty = (float)frequency;
    p->top_k = top_k > 0 ? (uint32_t)top_k : 0;
    p->seed = (uint64_t)seed;
    if (top_p <= 0) { /* as OpenAI's: only the likeliest token */
        p->top_p = 1;
        p->top_k = 1;
    }
    return true;
}

bool ask_limit(ask *a, uint32_t node, const char *name) {
    int64_t limit = 0;
    if (!ask_whole(a, node, name, -2, UINT32_MAX, &limit)) return false;
    if (limit > 0) a->wish.sampling.max_tokens = (uint32_t)limit;
    if (limit < 0) a->wish.sampling.max_tokens = 0;
    return true;
}

/* ---- structured output ---- */

bool ask_schema(ask *a, uint32_t schema, const char *name) {
    mxd_json_writer w;
    mxd_error error = {.status = MXD_OK};
    mxd_json_writer_init(&w, 2 * BODY_BYTES);
    if (schema) mxd_json_put_node(&w, &a->json, schema);
    else mxd_json_append(&w, "{\"type\":\"object\"}", 17);
    for (uint32_t i = 0; i < a->wish.choices && !error.status; i++)
        (void)mxd_grammar_compile(a->server->run->model, w.data, w.len, &a->wish.grammars[i], &error);
    mxd_json_writer_free(&w);
    return error.status ? REFUSE(a, "'%s': %s", name, error.message) : true;
}

/* ---- conversations ---- */

/* Append the text of a content part. */
static bool add_part(ask *a, uint32_t part, text_buffer *out) {
    const char *type = "text", *text = NULL;
    if (!mxd_json_is(&a->json, part, MXD_JSON_OBJECT)) return REFUSE(a, "a part of 'content' is not an object");
    if (!ask_text(a, part, "type", &type) || !ask_text(a, part, "text", &text)) return false;
    if (!text || (strcmp(type, "text") && strcmp(type, "input_text") && strcmp(type, "output_text")))
        return REFUSE(a, "a part of 'content' is of type '%.32s': this model reads text only", type);
    append(out, text, strlen(text));
    return true;
}

bool ask_message(ask *a, const char *role, uint32_t content) {
    text_buffer text = {0};
    bool taken = true;
    append(&text, "", 0);
    if (content && mxd_json_is(&a->json, content, MXD_JSON_ARRAY)) {
        for (uint32_t i = mxd_json_first(&a->json, content); taken && i; i = mxd_json_next(&a->json, content, i))
            taken = add_part(a, i, &text);
    } else if (content && !mxd_json_is(&a->json, content, MXD_JSON_NULL)) {
        const char *plain = plain_text(a, content, "content");
        taken = plain;
        if (plain) append(&text, plain, strlen(plain));
    }
    if (!taken) {
        free(text.data);
        return false;
    }
    a->messages = reallocate(a->messages, (a->message_count + 1) * sizeof *a->messages);
    if (!strcmp(role, "developer")) role = "system";
    a->messages[a->message_count++] = (mxd_message){role, text.data};
    return true;
}

bool ask_messages(ask *a, uint32_t array, const char *name) {
    if (!array || !mxd_json_is(&a->json, array, MXD_JSON_ARRAY)) return REFUSE(a, "'%s' has to be an array", name);
    for (uint32_t i = mxd_json_first(&a->json, array); i; i = mxd_json_next(&a->json, array, i)) {
        const char *role = NULL;
        if (!mxd_json_is(&a->json, i, MXD_JSON_OBJECT)) return REFUSE(a, "an item of '%s' is not an object", name);
        if (!ask_text(a, i, "role", &role)) return false;
        if (!role) return REFUSE(a, "an item of '%s' has no role", name);
        if (!ask_message(a, role, mxd_json_get(&a->json, i, "content"))) return false;
    }
    return true;
}

/* ---- prompts ---- */

bool ask_encode_chat(ask *a) {
    const mxd_model *model = a->server->run->model;
    mxd_error error;
    wish *w = &a->wish;
    mxd_status status = mxd_chat_encode(model, a->messages, a->message_count, 1, NULL, 0, &w->n, &error);
    if (status == MXD_ERR_BUFFER) {
        w->ids = allocate(w->n * sizeof *w->ids);
        status = mxd_chat_encode(model, a->messages, a->message_count, 1, w->ids, w->n, &w->n, &error);
    }
    return status ? refuse_error(a, &error) : true;
}

bool ask_encode_text(ask *a, const char *text, size_t length) {
    const mxd_model *model = a->server->run->model;
    mxd_error error;
    wish *w = &a->wish;
    mxd_status status = mxd_encode(model, text, length, NULL, 0, &w->n, &error);
    if (status && status != MXD_ERR_BUFFER) return refuse_error(a, &error);
    w->ids = allocate((w->n + 1) * sizeof *w->ids);
    if (mxd_encode(model, text, length, w->ids, w->n, &w->n, &error)) return refuse_error(a, &error);
    if (w->n > 0) return true;
    if (a->server->info.bos == UINT32_MAX) return REFUSE(a, "the prompt is empty, and this model has no BOS token");
    w->ids[w->n++] = a->server->info.bos; /* as generate --raw does */
    return true;
}

void ask_begin(ask *a) {
    mxd_error error;
    wish *w = &a->wish;
    if (w->n >= a->server->plan->ctx) {
        refuse(a->server, a->connection, a->dialect, 400, "context_length_exceeded",
               "the prompt has %zu tokens, the context %u: no room to answer", w->n, (unsigned)a->server->plan->ctx);
        return;
    }
    if (mxd_sampling_check(&w->sampling, &error)) refuse_error(a, &error);
    else exchange_begin(a->server, a->connection, a->dialect, w);
}
