/* SPDX-License-Identifier: Apache-2.0 */
/* Counts what the token path must not do: prints how often memory was allocated until the engine was open, and what
 * opening, copying, truncating and reading sequences, 20 steps of one and 20 of all did; steps verify DRAFTS drafted
 * tokens for each sequence (0: as many as pay):
 *   token_path BUNDLE THREADS SEQUENCES DRAFTS
 * Every second sequence samples; the others are greedy.
 * Linked with the runtime's sources. The program's own functions take the place of the C library's; a lock or a wait
 * that is not contended makes no system call, so it is counted here, before the futex. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mxdraft.h"

enum { MAX_SEQUENCES = 64, STEPS = 20, VOCAB = 1 << 12 };

static atomic_ulong allocations, locks, waits, wakes;

/* What glibc calls its own. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *old, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, size);
}

void *aligned_alloc(size_t alignment, size_t size) {
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    atomic_fetch_add(&allocations, 1);
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

static int (*real_lock)(pthread_mutex_t *), (*real_broadcast)(pthread_cond_t *), (*real_signal)(pthread_cond_t *);
static int (*real_wait)(pthread_cond_t *, pthread_mutex_t *);

static void find_real_functions(void) {
    *(void **)&real_lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    *(void **)&real_wait = dlsym(RTLD_NEXT, "pthread_cond_wait");
    *(void **)&real_signal = dlsym(RTLD_NEXT, "pthread_cond_signal");
    *(void **)&real_broadcast = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
}

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    atomic_fetch_add(&locks, 1);
    return real_lock(mutex);
}

int pthread_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    atomic_fetch_add(&waits, 1);
    return real_wait(condition, mutex);
}

int pthread_cond_signal(pthread_cond_t *condition) {
    atomic_fetch_add(&wakes, 1);
    return real_signal(condition);
}

int pthread_cond_broadcast(pthread_cond_t *condition) {
    atomic_fetch_add(&wakes, 1);
    return real_broadcast(condition);
}

static void check(mxd_status status, const mxd_error *err) {
    if (!status) return;
    fprintf(stderr, "%s\n", err->message);
    exit(1);
}

/* Drafts a chain of any tokens: what it proposes need not be right to be ranked. */
static size_t draft_any(void *arg, const uint32_t *ids, size_t n, uint32_t *out, int32_t *parent, size_t most) {
    (void)arg, (void)parent;
    for (size_t i = 0; i < most; i++) out[i] = 3 + (ids[n - 1] + (uint32_t)i) % 400;
    return most;
}

int main(int argc, char **argv) {
    mxd_error err;
    mxd_model *model;
    mxd_engine *engine;
    mxd_seq *seqs[MAX_SEQUENCES];
    if (argc != 5) return 2;
    size_t count = strtoul(argv[3], NULL, 10);
    uint32_t drafts = (uint32_t)atoi(argv[4]);
    if (count < 1 || count > MAX_SEQUENCES) return 2;
    find_real_functions();
    check(mxd_model_open(argv[1], &model, &err), &err);
    mxd_options options;
    mxd_options_default(&options);
    options.threads = (uint32_t)atoi(argv[2]);
    options.max_seqs = (uint32_t)count;
    options.max_rows = 512;
    options.ctx = 256;
    options.draft_max = options.draft_min = drafts;
    check(mxd_engine_open(model, &options, &engine, &err), &err);
    const char *stop[] = {"a text that does not come"};
    mxd_sampling sampling;
    mxd_sampling_default(&sampling);
    sampling.repeat_penalty = 1.1f;
    sampling.ignore_eos = 1;
    sampling.stop = stop;
    sampling.stop_count = 1;
    const uint32_t prompt[] = {1, 2, 3, 4, 5};
    static float logits[2 * VOCAB];
    mxd_model_info info;
    mxd_model_get_info(model, &info);
    if (info.vocab > VOCAB) return 2;

    unsigned long opening = atomic_load(&allocations), before[] = {locks, waits, wakes};
    for (size_t i = 2; i < count; i++) {
        sampling.temperature = i % 2 ? 0.0f : 0.8f;
        sampling.top_k = i % 2 ? 0 : 40;
        check(mxd_seq_open(engine, &sampling, &seqs[i], &err), &err);
    }
    check(mxd_seq_open(engine, &sampling, &seqs[1], &err), &err);
    check(mxd_seq_logits(seqs[1], prompt, 2, logits, &err), &err);
    check(mxd_seq_copy(seqs[1], &sampling, &seqs[0], &err), &err);
    for (size_t i = 0; i < 2; i++) check(mxd_seq_truncate(seqs[i], i, &err), &err);
    for (size_t i = 0; i < count && drafts; i++) mxd_seq_set_drafter(seqs[i], draft_any, NULL);
    for (size_t i = 0; i < count; i++) check(mxd_seq_prompt(seqs[i], prompt, 5, &err), &err);
    for (int i = 0; i < STEPS; i++) check(mxd_step(engine, seqs, 1, &err), &err);
    for (int i = 0; i < STEPS; i++) check(mxd_step(engine, seqs, count, &err), &err);
    unsigned long made[] = {allocations - opening, locks - before[0], waits - before[1], wakes - before[2]};

    size_t tokens;
    unsigned long long drafted = 0, accepted = 0; /* of all; of the first, as its tokens are */
    mxd_seq_tokens(seqs[0], &tokens);
    for (size_t i = 0; i < count; i++) {
        mxd_stats stats;
        mxd_seq_get_stats(seqs[i], &stats);
        drafted += stats.drafted;
        if (i == 0) accepted = stats.accepted;
    }
    printf("tokens %zu\naccepted %llu\ndrafted %llu\nopening %lu\nallocations %lu\nlocks %lu\nwaits %lu\nwakes %lu\n",
           tokens, accepted, drafted, opening, made[0], made[1], made[2], made[3]);
    for (size_t i = 0; i < count; i++) mxd_seq_close(&seqs[i]);
    mxd_engine_close(&engine);
    mxd_model_close(&model);
    return 0;
}
