/* SPDX-License-Identifier: Apache-2.0 */
#include "lists.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../src/machine.h"
#include "openai.h"
#include "put.h"
#include "request.h"

void answer_health(server *s, connection *c) {
    static const char body[] = "{\"status\":\"ok\"}";
    respond(s, c, 200, "application/json", body, sizeof body - 1);
}

void answer_props(server *s, connection *c) {
    mxd_json_writer w;
    mxd_json_writer_init(&w, 65536);
    mxd_json_open(&w, '{');
    put_open(&w, "default_generation_settings", '{');
    put_whole(&w, "n_ctx", s->plan->ctx);
    mxd_json_close(&w, '}');
    put_whole(&w, "total_slots", s->parallel);
    put_text(&w, "model_alias", s->model_name);
    put_text(&w, "build_info", mxd_version());
    mxd_json_close(&w, '}');
    respond(s, c, 200, "application/json", w.data, w.len);
    mxd_json_writer_free(&w);
}

static void add_metric(text_buffer *t, const char *name, const char *type, const char *help, double value) {
    append_text(t, "# HELP mxdraft_%s %s\n# TYPE mxdraft_%s %s\nmxdraft_%s %.17g\n", name, help, name, type, name,
                value);
}

void answer_metrics(server *s, connection *c) {
    scheduler_totals t;
    text_buffer body = {0};
    scheduler_get_totals(s->scheduler, &t);
    const struct {
        const char *name, *type, *help;
        double value;
    } metrics[] = {
        {"requests_total", "counter", "HTTP requests.", (double)s->requests},
        {"refused_total", "counter", "HTTP requests answered with a status of 400 or more.", (double)s->refused},
        {"answers_total", "counter", "Answers generated to their end.", (double)t.answers},
        {"failures_total", "counter", "Answers that failed.", (double)t.failures},
        {"cancelled_total", "counter", "Answers whose client hung up.", (double)t.cancelled},
        {"prompt_tokens_total", "counter", "Tokens of prompts.", (double)t.prompt_tokens},
        {"cached_tokens_total", "counter", "Tokens of prompts that the cache had.", (double)t.cached_tokens},
        {"generated_tokens_total", "counter", "Tokens generated.", (double)t.generated_tokens},
        {"drafted_tokens_total", "counter", "Tokens drafted, of answers that ended.", (double)t.drafted},
        {"accepted_tokens_total", "counter", "Drafted tokens that were right.", (double)t.accepted},
        {"steps_total", "counter", "Engine steps.", (double)t.steps},
        {"busy_seconds_total", "counter", "Time spent in engine steps.", t.busy_s},
        {"running", "gauge", "Answers being generated.", t.running},
        {"parallel", "gauge", "Most answers at once.", t.parallel},
        {"queued", "gauge", "Answers that wait for their turn.", t.queued},
        {"parked", "gauge", "Sequences kept by the prompt cache.", t.parked},
        {"connections", "gauge", "Open connections.", s->connection_count},
        {"plan_bytes", "gauge", "Memory plan.", (double)s->plan->total},
        {"resident_bytes", "gauge", "Memory in use.", (double)mxd_rss()},
        {"uptime_seconds", "gauge", "Time since the start.", clock_seconds() - s->started},
    };
    for (size_t i = 0; i < sizeof metrics / sizeof *metrics; i++)
        add_metric(&body, metrics[i].name, metrics[i].type, metrics[i].help, metrics[i].value);
    double temperature = mxd_temperature();
    int64_t flags = mxd_throttle_flags();
    if (!isnan(temperature))
        add_metric(&body, "temperature_celsius", "gauge", "The hottest thermal zone.", temperature);
    if (flags >= 0) add_metric(&body, "throttle_flags", "gauge", "vcgencmd get_throttled.", (double)flags);
    respond(s, c, 200, "text/plain; version=0.0.4; charset=utf-8", body.data, body.length);
    free(body.data);
}

void answer_tokenize(server *s, connection *c) {
    ask a;
    const char *text = NULL;
    if (ask_open(&a, s, c, &openai_chat_dialect) && ask_text(&a, 0, "content", &text)) {
        mxd_error error;
        size_t n = 0;
        if (!text) text = "";
        mxd_encode(s->run->model, text, strlen(text), NULL, 0, &n, &error);
        uint32_t *ids = allocate(n * sizeof *ids);
        mxd_json_writer w;
        mxd_json_writer_init(&w, 16 << 20);
        mxd_json_open(&w, '{');
        put_open(&w, "tokens", '[');
        if (!mxd_encode(s->run->model, text, strlen(text), ids, n, &n, &error))
            for (size_t i = 0; i < n; i++) mxd_json_put_integer(&w, ids[i]);
        mxd_json_close(&w, ']');
        mxd_json_close(&w, '}');
        respond(s, c, 200, "application/json", w.data, w.len);
        mxd_json_writer_free(&w);
        free(ids);
    }
    ask_free(&a);
}
