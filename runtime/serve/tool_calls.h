/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of tools that a request demands, in OpenAI's words. A grammar makes the answer one call; nothing is executed. */
#ifndef MXDRAFT_SERVE_TOOL_CALLS_H
#define MXDRAFT_SERVE_TOOL_CALLS_H

#include "request.h"

/* Read tools and tool_choice. "auto" and "none" leave the answer as it is; "required" and a tool's name let it fit one
 * call. Refuses the request and returns false if that is not possible. */
bool ask_tool_choice(ask *a);
/* Whether an answer is a whole call; one that was cut is text. */
bool is_tool_call(const exchange *e, const choice *h);
/* Put what is said in place of content: the call, with the index that pieces of a stream have. */
void put_tool_call(const exchange *e, const choice *h, bool with_index, mxd_json_writer *w);

#endif
