/* SPDX-License-Identifier: Apache-2.0 */
/* An answer that is being generated, and how it gets to its connection: at once, or in pieces as it is made. */
#ifndef MXDRAFT_SERVE_EXCHANGE_H
#define MXDRAFT_SERVE_EXCHANGE_H

#include "../src/json.h"
#include "server.h"

enum { MOST_CHOICES = 8, ID_BYTES = 32 };

/* One of the answers to a request. */
typedef struct choice {
    job *job;
    uint32_t index;
    text_buffer text, told; /* all of it, unless it goes out in pieces; of its tokens (logprobs.h) */
    size_t characters;      /* of the tokens that were told of before */
    job_news news;          /* the latest; its buffers are set while a piece is worded */
    bool done;
} choice;

/* How a protocol words an answer. Each function appends to *out. */
typedef struct dialect {
    const char *type;                                       /* of a stream */
    bool keeps_text;                                        /* for the end of a stream */
    void (*begin)(const exchange *e, mxd_json_writer *out); /* a stream; NULL: with nothing */
    void (*piece)(const exchange *e, const choice *c,
                  mxd_json_writer *out);                    /* news of a choice; c->done: the last ones */
    void (*end)(const exchange *e, mxd_json_writer *out);   /* a stream; NULL: with nothing */
    void (*whole)(const exchange *e, mxd_json_writer *out); /* an answer that is not streamed */
    void (*fault)(const exchange *e, const char *message, mxd_json_writer *out);            /* within a stream */
    void (*error)(int status, const char *message, const char *code, mxd_json_writer *out); /* a body */
} dialect;

struct exchange {
    const dialect *dialect;
    char id[ID_BYTES]; /* hexadecimal digits */
    int64_t created;   /* seconds since 1970 */
    double started;    /* clock_seconds() */
    const char *model;
    uint64_t seed; /* of the first choice; the others count up from it */
    size_t prompt_tokens;
    bool streamed, with_usage, with_origins, begun;
    uint64_t pieces; /* of the stream, until now */
    bool calls_tool; /* its text is shown when it is whole */
    uint32_t told;   /* entries for each token (logprobs.h); 0: none */
    const mxd_model *tokenizer;
    uint32_t count;
    choice choices[MOST_CHOICES];
};

/* What a request asks to be generated. */
typedef struct wish {
    mxd_grammar *grammars[MOST_CHOICES]; /* one for each choice, or all NULL; a job that is queued takes its own */
    uint32_t *ids;                       /* allocated */
    size_t n;
    mxd_sampling sampling;
    const char *stops[MAX_STOPS]; /* point into the request */
    uint32_t choices;
    bool streamed, with_usage, with_origins, calls_tool;
} wish;

/* Begin to answer on a connection, or refuse it there in the dialect's words. */
void exchange_begin(server *s, connection *c, const dialect *d, wish *w);
/* Send what is new; end and free c->exchange once all is said. */
void exchange_advance(server *s, connection *c);
/* Forget an exchange and stop what it generates. */
void exchange_drop(server *s, exchange **e);
/* Refuse a request in a dialect's words; `code` may be NULL. */
void refuse(server *s, connection *c, const dialect *d, int status, const char *code, const char *format, ...)
    __attribute__((format(printf, 6, 7)));

/* Tokens that were generated for all choices, and those of the prompt that the cache had for the first. */
uint64_t exchange_generated(const exchange *e);
size_t exchange_cached(const exchange *e);

#endif
