/* SPDX-License-Identifier: Apache-2.0 */
#include "scheduler.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "prefixes.h"

typedef enum job_state { QUEUED, RUNNING, DONE } job_state;

struct job {
    job *next; /* in the queue */
    uint32_t *ids;
    size_t n;
    mxd_sampling sampling;
    const char *stops[MAX_STOPS]; /* each allocated */
    mxd_grammar *grammar;         /* or NULL */

    /* Guarded by the scheduler's mutex. */
    job_state state;
    bool dropped; /* nobody waits for it: whoever finds it done frees it */
    job_news news;

    /* The engine thread's. */
    mxd_seq *seq;
    text_buffer held; /* origins of the text that the sequence holds back */
};

struct scheduler {
    const session *run;
    prefix_cache cache;
    uint32_t parallel;
    int wake_fd;
    job *live[MOST_SEQUENCES]; /* the engine thread's */

    pthread_mutex_t mutex;
    pthread_cond_t work;
    job *first; /* queued */
    scheduler_totals totals;
};

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- jobs ---- */

static void free_job(job *j) {
    for (uint32_t i = 0; i < j->sampling.stop_count; i++) free((void *)j->stops[i]);
    free(j->news.text.data);
    free(j->news.origins.data);
    free(j->news.told.data);
    free(j->held.data);
    mxd_grammar_free(&j->grammar);
    free(j->ids);
    free(j);
}

job *scheduler_submit(scheduler *s, const uint32_t *ids, size_t n, const mxd_sampling *sampling,
                      mxd_grammar **grammar) {
    pthread_mutex_lock(&s->mutex);
    bool full = s->totals.queued == QUEUE_LENGTH;
    pthread_mutex_unlock(&s->mutex);
    if (full) return NULL;
    job *j = allocate(sizeof *j);
    *j = (job){.n = n, .sampling = *sampling, .ids = allocate(n * sizeof *ids), .grammar = *grammar};
    *grammar = NULL;
    memcpy(j->ids, ids, n * sizeof *ids);
    for (uint32_t i = 0; i < sampling->stop_count; i++) j->stops[i] = format_text("%s", sampling->stop[i]);
    j->sampling.stop = j->stops;
    pthread_mutex_lock(&s->mutex);
    job **end = &s->first;
    while (*end) end = &(*end)->next;
    *end = j;
    s->totals.queued++;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->mutex);
    return j;
}

void scheduler_news(scheduler *s, job *j, job_news *out) {
    pthread_mutex_lock(&s->mutex);
    *out = j->news;
    j->news.text = j->news.origins = j->news.told = (text_buffer){0};
    pthread_mutex_unlock(&s->mutex);
}

void scheduler_drop(scheduler *s, job **j) {
    if (!*j) return;
    pthread_mutex_lock(&s->mutex);
    (*j)->dropped = true;
    bool done = (*j)->state == DONE;
    pthread_mutex_unlock(&s->mutex);
    if (done) free_job(*j);
    *j = NULL;
}

void scheduler_get_totals(scheduler *s, scheduler_totals *out) {
    pthread_mutex_lock(&s->mutex);
    *out = s->totals;
    pthread_mutex_unlock(&s->mutex);
}

/* ---- the engine's thread; those in this section are called with the mutex held ---- */

static void wake(const scheduler *s) {
    while (write(s->wake_fd, "", 1) < 0 && errno == EINTR) {
    }
}

/* End a job. */
static void finish(scheduler *s, job *j, const mxd_error *error) {
    scheduler_totals *t = &s->totals;
    if (j->dropped) t->cancelled++;
    else if (error) t->failures++;
    else t->answers++;
    if (j->seq) {
        j->news.stop = mxd_seq_stop(j->seq);
        mxd_seq_get_stats(j->seq, &j->news.stats);
        t->drafted += j->news.stats.drafted;
        t->accepted += j->news.stats.accepted;
        mxd_seq_set_grammar(j->seq, NULL, 0, &(mxd_error){0}); /* it goes with the job */
        if (error) prefix_close(&s->cache, &j->seq);
        else prefix_park(&s->cache, &j->seq);
    }
    if (error) j->news.error = *error;
    j->news.done = true;
    j->state = DONE;
    wake(s);
    if (j->dropped) free_job(j);
}

/* End a running job. */
static void end(scheduler *s, uint32_t i, const mxd_error *error) {
    finish(s, s->live[i], error);
    s->live[i] = NULL;
}

/* Take the first job that somebody waits for out of the queue. */
static job *next_job(scheduler *s) {
    while (s->first) {
        job *j = s->first;
        s->first = j->next;
        s->totals.queued--;
        if (!j->dropped) return j;
        finish(s, j, NULL);
    }
    return NULL;
}

/* Add to the news who drafted the text that the step released. */
static void add_origins(const scheduler *s, job *j, size_t length) {
    size_t n, drafts;
    const uint32_t *ids = mxd_seq_output(j->seq, &n);
    const uint8_t *drafted = mxd_seq_drafted(j->seq);
    const mxd_draft_record *records = mxd_seq_drafts(j->seq, &drafts);
    int32_t parent = -1;
    for (size_t i = 0; i < n; i++) {
        char origin = '-';
        for (size_t k = 0; drafted[i] && k < drafts && origin == '-'; k++)
            if (records[k].accepted && records[k].parent == parent && records[k].token == ids[i]) {
                origin = (char)('0' + records[k].source);
                parent = (int32_t)k;
            }
        size_t size;
        mxd_token_bytes(s->run->model, ids[i], &size);
        if (mxd_token_is_special(s->run->model, ids[i])) size = 0;
        for (size_t k = 0; k < size; k++) append(&j->held, &origin, 1);
    }
    if (length == 0) return;
    append(&j->news.origins, j->held.data, length);
    j->held.length -= length;
    memmove(j->held.data, j->held.data + length, j->held.length);
}

/* Hand on what a step made. */
static void harvest(scheduler *s, uint32_t i) {
    job *j = s->live[i];
    size_t length, n;
    const char *text = mxd_seq_text(j->seq, &length);
    mxd_seq_output(j->seq, &n);
    append(&j->news.text, text, length);
    if (j->sampling.logprobs)
        append(&j->news.told, (const char *)mxd_seq_logprobs(j->seq),
               n * j->sampling.logprobs * sizeof(mxd_alternative));
    add_origins(s, j, length);
    j->news.tokens += n;
    s->totals.generated_tokens += n;
    if (mxd_seq_stop(j->seq) != MXD_STOP_NONE) end(s, i, NULL);
}

/* Start queued jobs while there are places. */
static void start_jobs(scheduler *s) {
    job *j;
    while (s->totals.running < s->parallel && (j = next_job(s))) {
        mxd_error error;
        size_t cached = 0;
        pthread_mutex_unlock(&s->mutex); /* copying takes a while */
        mxd_status status = prefix_open(&s->cache, j->ids, j->n, &j->sampling, &j->seq, &cached, &error);
        if (!status) status = mxd_seq_set_grammar(j->seq, j->grammar, j->n, &error);
        pthread_mutex_lock(&s->mutex);
        if (status) {
            finish(s, j, &error);
            continue;
        }
        j->state = RUNNING;
        j->news.cached = cached;
        s->totals.prompt_tokens += j->n;
        s->totals.cached_tokens += cached;
        s->live[s->totals.running++] = j;
    }
    s->totals.parked = prefix_parked(&s->cache);
}

/* Stop the jobs that nobody waits for any more, and close the gaps among the running ones. */
static void stop_jobs(scheduler *s) {
    uint32_t kept = 0, count = s->totals.running;
    for (uint32_t i = 0; i < count; i++) {
        if (s->live[i] && s->live[i]->dropped) end(s, i, NULL);
        if (s->live[i]) s->live[kept++] = s->live[i];
    }
    s->totals.running = kept;
}

/* Run a step for all live jobs; where it fails, one for each, so that a fault of one is no fault of another. */
static void step(scheduler *s) {
    mxd_seq *seqs[MOST_SEQUENCES];
    mxd_error errors[MOST_SEQUENCES];
    uint32_t count = s->totals.running;
    for (uint32_t i = 0; i < count; i++) {
        seqs[i] = s->live[i]->seq;
        errors[i].status = MXD_OK;
    }
    pthread_mutex_unlock(&s->mutex);
    double start = seconds_now();
    mxd_status status = mxd_step(s->run->engine, seqs, count, &errors[0]);
    if (status && count > 1)
        for (uint32_t i = 0; i < count; i++)
            if (!mxd_step(s->run->engine, &seqs[i], 1, &errors[i])) errors[i].status = MXD_OK;
    double seconds = seconds_now() - start;
    pthread_mutex_lock(&s->mutex);
    s->totals.busy_s += seconds;
    s->totals.steps++;
    for (uint32_t i = 0; i < count; i++) {
        if (errors[i].status) end(s, i, &errors[i]);
        else harvest(s, i);
    }
}

static void *work(void *arg) {
    scheduler *s = arg;
    pthread_mutex_lock(&s->mutex);
    for (;;) {
        stop_jobs(s);
        start_jobs(s);
        if (s->totals.running == 0) {
            pthread_cond_wait(&s->work, &s->mutex);
            continue;
        }
        step(s);
        wake(s);
    }
    return NULL;
}

int scheduler_start(const session *run, uint32_t sequences, uint32_t parallel, int wake_fd, scheduler **out) {
    scheduler *s = allocate(sizeof *s);
    *s = (scheduler){.run = run,
                     .cache = {.engine = run->engine, .count = sequences},
                     .parallel = parallel,
                     .wake_fd = wake_fd,
                     .totals = {.sequences = sequences, .parallel = parallel}};
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_t thread;
    int reason = pthread_create(&thread, NULL, work, s);
    if (reason) {
        free(s);
        return fail(EXIT_CAPACITY, "cannot start a thread: %s", strerror(reason));
    }
    pthread_detach(thread);
    *out = s;
    return EXIT_DONE;
}
