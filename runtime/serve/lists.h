/* SPDX-License-Identifier: Apache-2.0 */
/* What is told about the server itself. */
#ifndef MXDRAFT_SERVE_LISTS_H
#define MXDRAFT_SERVE_LISTS_H

#include "server.h"

void answer_health(server *s, connection *c);
void answer_props(server *s, connection *c);
void answer_metrics(server *s, connection *c);
void answer_tokenize(server *s, connection *c);

#endif
