/* Prints how often memory was allocated until a sequence was open, and how often in its 50 steps; and the locks taken:
 *   step_allocations BUNDLE THREADS
 * The program's own functions take the place of the C library's in every library of the process. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "mxdraft.h"

static atomic_ulong allocations, locks;
static int (*lock_mutex)(pthread_mutex_t *);

/* What glibc calls its own. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);

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

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    atomic_fetch_add(&allocations, 1);
    return (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
}

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    atomic_fetch_add(&locks, 1);
    return lock_mutex(mutex);
}

static void check(mxd_status status, const mxd_error *err) {
    if (!status) return;
    fprintf(stderr, "%s\n", err->message);
    exit(1);
}

int main(int argc, char **argv) {
    mxd_error err;
    mxd_model *model;
    mxd_engine *engine;
    mxd_seq *seq;
    if (argc != 3) return 2;
    *(void **)&lock_mutex = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    check(mxd_model_open(argv[1], &model, &err), &err);
    mxd_options options;
    mxd_options_default(&options);
    options.threads = (uint32_t)atoi(argv[2]);
    check(mxd_engine_open(model, &options, &engine, &err), &err);
    const char *stop[] = {"a text that does not come"};
    mxd_sampling sampling;
    mxd_sampling_default(&sampling);
    sampling.temperature = 0.8f;
    sampling.top_k = 40;
    sampling.repeat_penalty = 1.1f;
    sampling.ignore_eos = 1;
    sampling.stop = stop;
    sampling.stop_count = 1;
    check(mxd_seq_open(engine, &sampling, &seq, &err), &err);
    const uint32_t prompt[] = {1, 2, 3, 4, 5};

    unsigned long opening = atomic_load(&allocations);
    atomic_store(&locks, 0);
    check(mxd_seq_prompt(seq, prompt, 5, &err), &err);
    for (int i = 0; i < 50; i++) check(mxd_step(engine, &seq, 1, &err), &err);
    unsigned long steps = atomic_load(&allocations) - opening, locked = atomic_load(&locks);

    size_t tokens;
    mxd_seq_tokens(seq, &tokens);
    printf("tokens %zu\nopening %lu\nsteps %lu\nlocks %lu\n", tokens, opening, steps, locked);
    mxd_seq_close(&seq);
    mxd_engine_close(&engine);
    mxd_model_close(&model);
    return 0;
}
