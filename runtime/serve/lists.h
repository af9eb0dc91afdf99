/* SPDX-License-Identifier: Apache-2.0 */
/* What is told about the server itself. */
#ifndef MXDRAFT_SERVE_LISTS_H
#define MXDRAFT_SERVE_LISTS_H

#include "server.h"

/* Answer with the page for people: page.html, as page_html.h has it. */
void answer_page(server *s, connection *c);
void answer_health(server *s, connection *c);
void answer_props(server *s, connection *c);
void answer_metrics(server *s, connection *c);
void answer_tokenize(server *s, connection *c);

#endif
