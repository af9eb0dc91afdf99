/* SPDX-License-Identifier: Apache-2.0 */
/* What a request's JSON asks for. Each function refuses the request in the dialect's words and returns false if it
 * cannot be taken; members that are null count as not there, unknown ones are not looked at. */
#ifndef MXDRAFT_SERVE_REQUEST_H
#define MXDRAFT_SERVE_REQUEST_H

#include "../src/json.h"
#include "exchange.h"

typedef struct ask {
    server *server;
    connection *connection;
    const dialect *dialect;
    mxd_json json; /* the body: an object */
    wish wish;
    /* The conversation; content allocated, roles in json. */
    mxd_message *messages;
    size_t message_count;
} ask;

/* Parse the body and take the server's settings as what is wished for. Call ask_free() also after a failure. */
bool ask_open(ask *a, server *s, connection *c, const dialect *d);
/* The same with text[length] in place of the body. */
bool ask_open_text(ask *a, server *s, connection *c, const dialect *d, const char *text, size_t length);
void ask_free(ask *a);

/* Read a member of the object `node`: leave *out as it is if it is not there. */
bool ask_number(ask *a, uint32_t node, const char *name, double low, double high, double *out);
bool ask_whole(ask *a, uint32_t node, const char *name, int64_t low, int64_t high, int64_t *out);
bool ask_flag(ask *a, uint32_t node, const char *name, bool *out);
bool ask_text(ask *a, uint32_t node, const char *name, const char **out);
/* Find a member that is there and not null; 0: none. */
uint32_t ask_member(const ask *a, uint32_t node, const char *name);

/* Read temperature, top_p, top_k, min_p, seed, stop and the penalties from the object `node`. */
bool ask_sampling(ask *a, uint32_t node);
/* Read how many tokens are wanted at most; -1: until the context is full. */
bool ask_limit(ask *a, uint32_t node, const char *name);
/* Let the answer fit a schema, node of the body; 0: any object. */
bool ask_schema(ask *a, uint32_t schema, const char *name);
/* Add a message; content is a string, or parts of text. */
bool ask_message(ask *a, const char *role, uint32_t content);
/* Add the messages of an array. */
bool ask_messages(ask *a, uint32_t array, const char *name);
/* Encode the conversation, or a text as it is, for the prompt. */
bool ask_encode_chat(ask *a);
bool ask_encode_text(ask *a, const char *text, size_t length);
/* Begin the answer; refuse a prompt that does not fit, or sampling that is not possible. */
void ask_begin(ask *a);

#endif
