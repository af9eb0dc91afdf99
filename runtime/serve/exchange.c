/* SPDX-License-Identifier: Apache-2.0 */
#include "exchange.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "logprobs.h"

enum { ANSWER_BYTES = 16 << 20 }; /* far above any context's text */

void refuse(server *s, connection *c, const dialect *d, int status, const char *code, const char *format, ...) {
    char message[1024];
    mxd_json_writer body;
    mxd_json_writer_init(&body, ANSWER_BYTES);
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    d->error(status, message, code, &body);
    respond(s, c, status, "application/json", body.data, body.len);
    mxd_json_writer_free(&body);
}

void exchange_drop(server *s, exchange **e) {
    if (!*e) return;
    for (uint32_t i = 0; i < (*e)->count; i++) {
        scheduler_drop(s->scheduler, &(*e)->choices[i].job);
        free((*e)->choices[i].text.data);
        free((*e)->choices[i].told.data);
    }
    free(*e);
    *e = NULL;
}

/* Send what a function of the dialect says as a piece of the stream. */
static void say(connection *c, void words(const exchange *, mxd_json_writer *)) {
    mxd_json_writer piece;
    if (!words) return;
    mxd_json_writer_init(&piece, ANSWER_BYTES);
    words(c->exchange, &piece);
    stream_piece(c, piece.data, piece.len);
    mxd_json_writer_free(&piece);
}

void exchange_begin(server *s, connection *c, const dialect *d, wish *w) {
    exchange *e = allocate(sizeof *e);
    *e = (exchange){.dialect = d,
                    .created = (int64_t)time(NULL),
                    .started = clock_seconds(),
                    .model = s->model_name,
                    .seed = w->sampling.seed,
                    .prompt_tokens = w->n,
                    .told = w->sampling.logprobs,
                    .tokenizer = s->run->model,
                    .streamed = w->streamed,
                    .calls_tool = w->calls_tool,
                    .with_usage = w->with_usage,
                    .with_origins = w->with_origins};
    snprintf(e->id, sizeof e->id, "%016llx", (unsigned long long)random_bits());
    for (; e->count < w->choices; e->count++) {
        mxd_sampling sampling = w->sampling;
        sampling.stop = w->stops;
        sampling.seed += e->count;
        job *j = scheduler_submit(s->scheduler, w->ids, w->n, &sampling, &w->grammars[e->count]);
        if (!j) {
            exchange_drop(s, &e);
            refuse(s, c, d, 503, "overloaded", "%d requests wait already: try again later", QUEUE_LENGTH);
            return;
        }
        e->choices[e->count] = (choice){.job = j, .index = e->count};
    }
    c->exchange = e;
    if (!e->streamed) return;
    stream_begin(s, c, d->type);
    say(c, d->begin);
}

/* Fetch what is new of a choice, and word it if it is streamed. */
static void advance_choice(server *s, connection *c, choice *h) {
    exchange *e = c->exchange;
    uint64_t before = h->news.tokens;
    scheduler_news(s->scheduler, h->job, &h->news);
    h->done = h->news.done;
    if (!e->streamed || e->calls_tool || e->dialect->keeps_text) {
        append(&h->text, h->news.text.data, h->news.text.length);
        append(&h->told, h->news.told.data, h->news.told.length);
    }
    if (e->streamed && (h->news.tokens != before || h->done) && !h->news.error.status) {
        mxd_json_writer piece;
        mxd_json_writer_init(&piece, ANSWER_BYTES);
        e->dialect->piece(e, h, &piece);
        stream_piece(c, piece.data, piece.len);
        e->pieces += piece.len > 0;
        mxd_json_writer_free(&piece);
    }
    h->characters += count_characters(e, &h->news.told);
    free(h->news.text.data);
    free(h->news.told.data);
    free(h->news.origins.data);
    h->news.text = h->news.told = h->news.origins = (text_buffer){0};
    if (h->done) scheduler_drop(s->scheduler, &h->job);
}

/* Send the end, or what went wrong. */
static void conclude(server *s, connection *c, const mxd_error *fault) {
    exchange *e = c->exchange;
    mxd_json_writer body;
    mxd_json_writer_init(&body, ANSWER_BYTES);
    if (e->streamed) {
        if (fault) e->dialect->fault(e, fault->message, &body);
        stream_piece(c, body.data, body.len);
        if (!fault) say(c, e->dialect->end);
        stream_end(c);
    } else if (fault) {
        refuse(s, c, e->dialect, 500, "generation_failed", "%s", fault->message);
    } else {
        e->dialect->whole(e, &body);
        respond(s, c, 200, "application/json", body.data, body.len);
    }
    mxd_json_writer_free(&body);
    exchange_drop(s, &c->exchange);
}

void exchange_advance(server *s, connection *c) {
    exchange *e = c->exchange;
    bool done = true;
    for (uint32_t i = 0; i < e->count; i++) {
        choice *h = &e->choices[i];
        if (!h->done) advance_choice(s, c, h);
        if (h->news.error.status) {
            conclude(s, c, &h->news.error);
            return;
        }
        done &= h->done;
    }
    if (done) conclude(s, c, NULL);
}

uint64_t exchange_generated(const exchange *e) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < e->count; i++) sum += e->choices[i].news.tokens;
    return sum;
}

size_t exchange_cached(const exchange *e) {
    return e->choices[0].news.cached;
}
