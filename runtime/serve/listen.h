/* SPDX-License-Identifier: Apache-2.0 */
/* Where the server listens: on an address of its own, or on the sockets that systemd passes. */
#ifndef MXDRAFT_SERVE_LISTEN_H
#define MXDRAFT_SERVE_LISTEN_H

#include "server.h"

/* Open all listeners of the settings, and set s->loopback_only. Print an error and return its exit code. */
int open_listeners(server *s);
/* Tell on stderr where the server listens. */
void announce_listeners(const server *s);

#endif
