/* SPDX-License-Identifier: Apache-2.0 */
/* Wyoming's events over TCP, as voice assistants exchange them: a sentence in (`transcript`), an answer out (`handled`). An
 * event is a line of JSON, {"type", "data", "data_length", "payload_length"}, and as many bytes of further data and
 * payload as it says. */
#ifndef MXDRAFT_SERVE_WYOMING_H
#define MXDRAFT_SERVE_WYOMING_H

#include "server.h"

/* Take the next event from what was read, if it is whole; c->busy tells. What is not an event closes the connection. */
void wyoming_take(server *s, connection *c);

#endif
