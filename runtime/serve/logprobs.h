/* SPDX-License-Identifier: Apache-2.0 */
/* Log-probabilities, as OpenAI's API asks for and words them. A list of them has, for each token of a text,
 * e->told entries: its own and those of the likeliest tokens (mxd_seq_logprobs). */
#ifndef MXDRAFT_SERVE_LOGPROBS_H
#define MXDRAFT_SERVE_LOGPROBS_H

#include "request.h"

/* Read logprobs and top_logprobs of a chat, or logprobs of a completion: a number. */
bool ask_chat_logprobs(ask *a);
bool ask_completion_logprobs(ask *a);
/* Put the member `logprobs` for a list; null if none were asked for. Tokens without text are left out. `characters` of
 * the completion come before. */
void put_chat_logprobs(const exchange *e, const text_buffer *list, mxd_json_writer *w);
void put_completion_logprobs(const exchange *e, const text_buffer *list, size_t characters, mxd_json_writer *w);
/* Count the characters of the tokens of a list. */
size_t count_characters(const exchange *e, const text_buffer *list);

#endif
