/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's thread: it answers several jobs at once, each in a sequence of its own, and parks sequences whose answers
 * are done, so that a later prompt that begins alike need not be read again. None of that changes an answer. */
#ifndef MXDRAFT_SERVE_SCHEDULER_H
#define MXDRAFT_SERVE_SCHEDULER_H

#include "../cli/cli.h"

enum { QUEUE_LENGTH = 64 };

typedef struct scheduler scheduler;

/* A prompt to continue. */
typedef struct job job;

/* What happened to a job since it was last asked. */
typedef struct job_news {
    text_buffer text;    /* the new text; the caller's */
    text_buffer told;    /* mxd_seq_logprobs() of its tokens, if asked for; the caller's */
    text_buffer origins; /* for each byte of it who drafted that, as '0' + mxd_source, else '-'; the caller's */
    uint64_t tokens;     /* generated until now */
    bool done;
    mxd_stop stop;   /* once done: why, unless there was an error */
    mxd_error error; /* status MXD_OK: none */
    size_t cached;   /* tokens of the prompt that were taken from another sequence */
    mxd_stats stats; /* once done */
} job_news;

/* Totals since the start, and what is going on now. */
typedef struct scheduler_totals {
    uint64_t answers, failures, cancelled, prompt_tokens, cached_tokens, generated_tokens, drafted, accepted, steps;
    double busy_s;
    uint32_t running, queued, parked, sequences, parallel;
} scheduler_totals;

/* Start a thread that owns the engine of *run until the process ends. It answers up to `parallel` jobs at once and
 * writes a byte to wake_fd, which does not block, after each step. */
int scheduler_start(const session *run, uint32_t sequences, uint32_t parallel, int wake_fd, scheduler **out);
/* Queue a job for the prompt ids[n], which is fewer than the context holds; the answer fits *grammar unless that is NULL.
 * All is copied, but the job takes the grammar and sets *grammar to NULL. NULL: the queue is full. */
job *scheduler_submit(scheduler *s, const uint32_t *ids, size_t n, const mxd_sampling *sampling, mxd_grammar **grammar);
void scheduler_news(scheduler *s, job *j, job_news *out);
/* Forget a job, done or not. It stops before the next step. */
void scheduler_drop(scheduler *s, job **j);
void scheduler_get_totals(scheduler *s, scheduler_totals *out);

#endif
