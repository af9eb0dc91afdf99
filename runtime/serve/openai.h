/* SPDX-License-Identifier: Apache-2.0 */
/* The OpenAI API, as far as a small text model serves it (docs/serve.md). */
#ifndef MXDRAFT_SERVE_OPENAI_H
#define MXDRAFT_SERVE_OPENAI_H

#include "exchange.h"

/* How all errors but Ollama's are worded. */
extern const dialect openai_chat_dialect;

/* Word an error as a body. */
void openai_error(int status, const char *message, const char *code, mxd_json_writer *w);

void openai_chat(server *s, connection *c);
void openai_completions(server *s, connection *c);
void openai_models(server *s, connection *c);
void openai_responses(server *s, connection *c); /* responses.c */

#endif
