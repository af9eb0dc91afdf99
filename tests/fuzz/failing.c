/* SPDX-License-Identifier: Apache-2.0 */
/* Make the n-th call of a libc function fail. Link with -Wl,--wrap=NAME for each name of FAILING_CALLS (the tests read the
 * list from here), and set
 *
 *   MXD_FAIL=write:3:28   the third write() fails with errno 28 (ENOSPC); a function that returns no errno just fails
 *   MXD_FAIL_COUNT=FILE   at exit, append a line "name calls" for every function
 *
 * A call fails once; what comes after it works again, so that an error path that carries on is seen, too. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "failing.h"

// clang-format off
#define FAILING_CALLS(X) \
    X(malloc) X(calloc) X(realloc) X(strdup) X(posix_memalign) X(mmap) X(pthread_create) X(open) X(fopen) X(fdopen) \
    X(read) X(write) X(fsync) X(rename) X(mkdir) X(fflush) X(fread) X(fgets) X(getline)
// clang-format on

#define NUMBER(name) CALL_##name,
enum { FAILING_CALLS(NUMBER) CALL_COUNT };
#define NAME(name) #name,
static const char *const names[] = {FAILING_CALLS(NAME)};

static atomic_ulong calls[CALL_COUNT];
static _Atomic int chosen = -1;
static unsigned long chosen_call;
static int chosen_errno;

void failing_choose(const char *name, unsigned long call, int error) {
    chosen = -1;
    for (int i = 0; i < CALL_COUNT; i++) {
        calls[i] = 0;
        if (!strcmp(names[i], name)) chosen = i;
    }
    chosen_call = call;
    chosen_errno = error;
}

unsigned long failing_calls(const char *name) {
    for (int i = 0; i < CALL_COUNT; i++)
        if (!strcmp(names[i], name)) return calls[i];
    return 0;
}

const char *failing_name(int i) {
    return i < CALL_COUNT ? names[i] : NULL;
}

/* Count a call; return whether it is the one that fails, with errno set. */
static int fails(int call) {
    unsigned long n = ++calls[call];
    if (chosen != call || n != chosen_call) return 0;
    errno = chosen_errno;
    return 1;
}

static void report(void) {
    char line[64];
    int fd = open(getenv("MXD_FAIL_COUNT"), O_WRONLY | O_CREAT | O_APPEND, 0666);
    for (int i = 0; i < CALL_COUNT && fd >= 0; i++) {
        int n = snprintf(line, sizeof line, "%s %lu\n", names[i], (unsigned long)calls[i]);
        if (write(fd, line, (size_t)n) < 0) break;
    }
    if (fd >= 0) close(fd);
}

__attribute__((constructor)) static void configure(void) {
    const char *text = getenv("MXD_FAIL");
    char name[32];
    unsigned long call;
    int error;
    if (text && sscanf(text, "%31[^:]:%lu:%d", name, &call, &error) == 3) failing_choose(name, call, error);
    if (getenv("MXD_FAIL_COUNT")) atexit(report);
}

/* ---- the functions ---- */

#define REAL(type, name, ...) extern type __real_##name(__VA_ARGS__)
REAL(void *, malloc, size_t);
REAL(void *, calloc, size_t, size_t);
REAL(void *, realloc, void *, size_t);
REAL(char *, strdup, const char *);
REAL(int, posix_memalign, void **, size_t, size_t);
REAL(void *, mmap, void *, size_t, int, int, int, off_t);
REAL(int, pthread_create, pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
REAL(int, open, const char *, int, ...);
REAL(FILE *, fopen, const char *, const char *);
REAL(FILE *, fdopen, int, const char *);
REAL(ssize_t, read, int, void *, size_t);
REAL(ssize_t, write, int, const void *, size_t);
REAL(int, fsync, int);
REAL(int, rename, const char *, const char *);
REAL(int, mkdir, const char *, mode_t);
REAL(int, fflush, FILE *);
REAL(size_t, fread, void *, size_t, size_t, FILE *);
REAL(char *, fgets, char *, int, FILE *);
REAL(ssize_t, getline, char **, size_t *, FILE *);

void *__wrap_malloc(size_t n) {
    return fails(CALL_malloc) ? NULL : __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t size) {
    return fails(CALL_calloc) ? NULL : __real_calloc(n, size);
}
void *__wrap_realloc(void *p, size_t n) {
    return fails(CALL_realloc) ? NULL : __real_realloc(p, n);
}
char *__wrap_strdup(const char *s) {
    return fails(CALL_strdup) ? NULL : __real_strdup(s);
}
int __wrap_posix_memalign(void **p, size_t align, size_t n) {
    return fails(CALL_posix_memalign) ? chosen_errno : __real_posix_memalign(p, align, n);
}
void *__wrap_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    return fails(CALL_mmap) ? MAP_FAILED : __real_mmap(at, n, protection, flags, fd, offset);
}
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *arg) {
    return fails(CALL_pthread_create) ? chosen_errno : __real_pthread_create(t, a, f, arg);
}
int __wrap_open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    return fails(CALL_open) ? -1 : __real_open(path, flags, mode);
}
FILE *__wrap_fopen(const char *path, const char *mode) {
    return fails(CALL_fopen) ? NULL : __real_fopen(path, mode);
}
FILE *__wrap_fdopen(int fd, const char *mode) {
    return fails(CALL_fdopen) ? NULL : __real_fdopen(fd, mode);
}
ssize_t __wrap_read(int fd, void *data, size_t n) {
    return fails(CALL_read) ? -1 : __real_read(fd, data, n);
}
ssize_t __wrap_write(int fd, const void *data, size_t n) {
    return fails(CALL_write) ? -1 : __real_write(fd, data, n);
}
int __wrap_fsync(int fd) {
    return fails(CALL_fsync) ? -1 : __real_fsync(fd);
}
int __wrap_rename(const char *from, const char *to) {
    return fails(CALL_rename) ? -1 : __real_rename(from, to);
}
int __wrap_mkdir(const char *path, mode_t mode) {
    return fails(CALL_mkdir) ? -1 : __real_mkdir(path, mode);
}
int __wrap_fflush(FILE *f) {
    return fails(CALL_fflush) ? EOF : __real_fflush(f);
}
size_t __wrap_fread(void *data, size_t size, size_t n, FILE *f) {
    return fails(CALL_fread) ? 0 : __real_fread(data, size, n, f);
}
char *__wrap_fgets(char *data, int n, FILE *f) {
    return fails(CALL_fgets) ? NULL : __real_fgets(data, n, f);
}
ssize_t __wrap_getline(char **line, size_t *cap, FILE *f) {
    return fails(CALL_getline) ? -1 : __real_getline(line, cap, f);
}
