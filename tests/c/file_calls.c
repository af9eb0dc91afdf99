/* SPDX-License-Identifier: Apache-2.0 */
/* A library to preload: once armed, the n-th call of a process that changes a file fails, or is where it dies.
 * Counted are open (for writing), write (to regular files), fsync, rename, unlink, mkdir and fchmod. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>
#include <unistd.h>

enum { KILL = -1, SHORT = -2, LOG = 1 << 16 };

static bool armed;
static long nth, seen;
static int action;    /* an errno, KILL, or SHORT: no call fails, but all writes are short */
static char log[LOG]; /* a letter a call, in order */

/* Count from now on; what happens at call number `n`, from 1 on, is `what`. */
void file_calls_arm(long n, int what) {
    nth = n;
    action = what;
    seen = 0;
    armed = true;
}

/* How many calls there were, and their letters: o, w, f, r, u, m, c. */
long file_calls_seen(const char **letters) {
    armed = false;
    *letters = log;
    return seen;
}

/* Whether this call, of the kind `letter`, has to fail. */
static bool fails(char letter) {
    if (!armed) return false;
    if (seen < LOG) log[seen] = letter;
    seen++;
    if (action == SHORT || seen != nth) return false;
    if (action == KILL) kill(getpid(), SIGKILL);
    errno = action;
    return true;
}

static void *next(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

#define OPEN(NAME)                                                                          \
    int NAME(const char *path, int flags, ...) {                                            \
        va_list list;                                                                       \
        va_start(list, flags);                                                              \
        mode_t mode = (flags & O_CREAT) != 0 ? va_arg(list, mode_t) : 0;                    \
        va_end(list);                                                                       \
        if ((flags & O_ACCMODE) != O_RDONLY && fails('o')) return -1;                       \
        int (*call)(const char *, int, ...) = (int (*)(const char *, int, ...))next(#NAME); \
        return call(path, flags, mode);                                                     \
    }
OPEN(open)
OPEN(open64)

#define CALL(RESULT, NAME, LETTER, PARAMETERS, ARGUMENTS)             \
    RESULT NAME PARAMETERS {                                          \
        if (fails(LETTER)) return -1;                                 \
        RESULT(*call) PARAMETERS = (RESULT(*) PARAMETERS)next(#NAME); \
        return call ARGUMENTS;                                        \
    }
CALL(int, fsync, 'f', (int fd), (fd))
CALL(int, rename, 'r', (const char *from, const char *to), (from, to))
CALL(int, unlink, 'u', (const char *path), (path))
CALL(int, mkdir, 'm', (const char *path, mode_t mode), (path, mode))
CALL(int, fchmod, 'c', (int fd, mode_t mode), (fd, mode))

ssize_t write(int fd, const void *data, size_t size) {
    struct stat st;
    bool file = armed && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    if (file && fails('w')) return -1;
    ssize_t (*call)(int, const void *, size_t) = (ssize_t (*)(int, const void *, size_t))next("write");
    return call(fd, data, file && action == SHORT ? (size + 1) / 2 : size);
}
