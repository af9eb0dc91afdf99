/* SPDX-License-Identifier: Apache-2.0 */
/* To be preloaded: the n-th call of a function that writes files fails once, as failing_choose() says. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CALLS(X) X(open64) X(write) X(fsync) X(rename) X(fchmod) X(mkdir) X(ftruncate64)
#define NUMBER(name) CALL_##name,
enum { CALLS(NUMBER) CALL_COUNT };
#define NAME(name) #name,
static const char *const names[] = {CALLS(NAME)};

static unsigned long calls[CALL_COUNT], chosen_call;
static int chosen = -1, chosen_errno;

/* Let call number `call` (from 1) of a function fail with an errno; a name of none: nothing. Starts all counts anew. */
void failing_choose(const char *name, unsigned long call, int error) {
    chosen = -1;
    for (int i = 0; i < CALL_COUNT; i++) {
        calls[i] = 0;
        if (!strcmp(names[i], name)) chosen = i;
    }
    chosen_call = call;
    chosen_errno = error;
}

/* Calls of function i since failing_choose(); *name is set, NULL after the last function. */
unsigned long failing_calls(int i, const char **name) {
    *name = i < CALL_COUNT ? names[i] : NULL;
    return i < CALL_COUNT ? calls[i] : 0;
}

static int fails(int call) {
    unsigned long n = ++calls[call];
    if (chosen != call || n != chosen_call) return 0;
    errno = chosen_errno;
    return 1;
}

#define REAL(type, name, ...)                             \
    static type (*real)(__VA_ARGS__);                     \
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name); \
    if (fails(CALL_##name)) return -1

int open64(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
    va_end(args);
    if (!(flags & O_CREAT)) return (int)syscall(SYS_openat, AT_FDCWD, path, flags); /* reading is another matter */
    REAL(int, open64, const char *, int, ...);
    return real(path, flags, mode);
}
ssize_t write(int fd, const void *data, size_t n) {
    REAL(ssize_t, write, int, const void *, size_t);
    return real(fd, data, n);
}
int fsync(int fd) {
    REAL(int, fsync, int);
    return real(fd);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    return real(from, to);
}
int fchmod(int fd, mode_t mode) {
    REAL(int, fchmod, int, mode_t);
    return real(fd, mode);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    return real(path, mode);
}
int ftruncate64(int fd, off64_t length) {
    REAL(int, ftruncate64, int, off64_t);
    return real(fd, length);
}
