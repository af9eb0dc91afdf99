/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "lists.h"
#include "ollama.h"
#include "openai.h"

typedef void handler(server *, connection *);

typedef struct path_entry {
    http_method method;
    const char *path;
    handler *answer;
    bool open; /* without the key */
} path_entry;

static const path_entry paths[] = {
    {HTTP_GET, "/", answer_page, true},
    {HTTP_GET, "/health", answer_health, true},
    {HTTP_GET, "/v1/health", answer_health, true},
    {HTTP_GET, "/v1/models", openai_models, false},
    {HTTP_GET, "/models", openai_models, false},
    {HTTP_POST, "/v1/chat/completions", openai_chat, false},
    {HTTP_POST, "/chat/completions", openai_chat, false},
    {HTTP_POST, "/v1/completions", openai_completions, false},
    {HTTP_POST, "/v1/responses", openai_responses, false},
    {HTTP_POST, "/tokenize", answer_tokenize, false},
    {HTTP_GET, "/props", answer_props, false},
    {HTTP_GET, "/metrics", answer_metrics, false},
    {HTTP_GET, "/api/version", ollama_version, false},
    {HTTP_GET, "/api/tags", ollama_tags, false},
    {HTTP_GET, "/api/ps", ollama_ps, false},
    {HTTP_POST, "/api/show", ollama_show, false},
    {HTTP_POST, "/api/chat", ollama_chat, false},
    {HTTP_POST, "/api/generate", ollama_generate, false},
    {HTTP_POST, "/api/pull", ollama_pull, false},
};

/* ---- who may ask ---- */

/* Compare in a time that depends on the lengths alone. */
static bool same_secret(http_text given, const char *secret) {
    size_t length = strlen(secret);
    unsigned char difference = given.length != length;
    for (size_t i = 0; i < given.length; i++)
        difference |= (unsigned char)(given.at[i] ^ secret[length > 0 ? i % length : 0]);
    return !difference;
}

static bool has_key(const server *s, const http_request *r) {
    static const char scheme[] = "Bearer ";
    const size_t n = sizeof scheme - 1;
    http_text given = r->authorization;
    if (!given.at || given.length < n || !http_is_name((http_text){given.at, n}, scheme)) return false;
    return same_secret((http_text){given.at + n, given.length - n}, s->api_key);
}

/* Tell whether a Host field names this machine itself. Any other name may belong to a page that had its name resolved
 * to 127.0.0.1. */
static bool names_loopback(http_text host) {
    static const char *const names[] = {"localhost", "127.0.0.1", "[::1]"};
    const char *colon = host.at ? memrchr(host.at, ':', host.length) : NULL;
    const char *bracket = host.at ? memrchr(host.at, ']', host.length) : NULL;
    if (colon && (!bracket || colon > bracket)) host.length = (size_t)(colon - host.at);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (http_is_name(host, names[i])) return true;
    return false;
}

/* Tell whether a page may ask: one of this server, or one that --cors names. */
static bool allows_origin(const server *s, const http_request *r) {
    static const char scheme[] = "http://";
    const size_t n = sizeof scheme - 1;
    const char *cors = s->settings->cors;
    if (!r->origin.at) return true;
    if (cors && (!strcmp(cors, "*") || http_is_name(r->origin, cors))) return true;
    return r->host.at && r->origin.length == n + r->host.length && !memcmp(r->origin.at, scheme, n) &&
           !memcmp(r->origin.at + n, r->host.at, r->host.length);
}

/* ---- routes ---- */

void route(server *s, connection *c) {
    const http_request *r = &c->request;
    const dialect *d = &openai_chat_dialect;
    const path_entry *found = NULL, *known = NULL;
    http_method method = r->method == HTTP_HEAD ? HTTP_GET : r->method;
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        if (!http_is(r->path, paths[i].path)) continue;
        known = &paths[i];
        if (paths[i].method == method) found = &paths[i];
    }
    if (!allows_origin(s, r)) {
        refuse(s, c, d, 403, "origin", "pages from elsewhere may not ask: see --cors");
    } else if (s->loopback_only && !s->api_key && r->host.at && !names_loopback(r->host)) {
        refuse(s, c, d, 403, "host", "this server answers as localhost or 127.0.0.1 only, or with an API key");
    } else if (r->method == HTTP_OPTIONS && s->settings->cors) {
        respond(s, c, 200, "text/plain", "", 0);
    } else if (s->api_key && !(found && found->open) && !has_key(s, r)) {
        refuse(s, c, d, 401, "invalid_api_key", "send the API key as 'Authorization: Bearer KEY'");
    } else if (found) {
        found->answer(s, c);
    } else if (known) {
        c->allow = known->method == HTTP_GET ? "GET, HEAD" : "POST";
        refuse(s, c, d, 405, NULL, "this path takes another method");
    } else {
        refuse(s, c, d, 404, NULL, "no such path: %.*s", (int)(r->path.length < 200 ? r->path.length : 200),
               r->path.at);
    }
}
