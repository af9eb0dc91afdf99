/* SPDX-License-Identifier: Apache-2.0 */
/* The n-th call of a libc function fails (failing.c). */
#ifndef FAILING_H
#define FAILING_H

/* Let call number `call` (from 1) of a function fail with an errno; NULL-like name "": none. Starts all counts anew. */
void failing_choose(const char *name, unsigned long call, int error);
/* Calls of a function since failing_choose(). */
unsigned long failing_calls(const char *name);
/* Name of function i, NULL after the last one. */
const char *failing_name(int i);

#endif
