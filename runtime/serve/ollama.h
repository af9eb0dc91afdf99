/* SPDX-License-Identifier: Apache-2.0 */
/* Ollama's API, as its Python client, Home Assistant and editors use it (docs/serve.md). */
#ifndef MXDRAFT_SERVE_OLLAMA_H
#define MXDRAFT_SERVE_OLLAMA_H

#include "exchange.h"

void ollama_version(server *s, connection *c);
void ollama_tags(server *s, connection *c);
void ollama_ps(server *s, connection *c);
void ollama_show(server *s, connection *c);
void ollama_chat(server *s, connection *c);
void ollama_generate(server *s, connection *c);
/* Answer /api/pull: the one model is here already. */
void ollama_pull(server *s, connection *c);

#endif
