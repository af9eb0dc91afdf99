/* SPDX-License-Identifier: Apache-2.0 */
#include "lists.h"
#include "page_html.h"

void answer_page(server *s, connection *c) {
    c->policy = page_policy;
    respond(s, c, 200, "text/html; charset=utf-8", page_html, sizeof page_html - 1);
}
