/* SPDX-License-Identifier: Apache-2.0 */
/* What comes in by -p, -f and standard input, and what goes out to files. */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

enum { TEXT_LIMIT_MIB = 16 }; /* far above any context, so that an endless stream ends in an error */
enum { READ_BYTES = 65536, FULL_LINE = 4095 /* N_TTY_BUF_SIZE - 1 */ };

/* Read once, waiting if the stream does not block: append READ_BYTES at most to *out, and set *n to their number, 0 at the
 * end. A terminal in line mode keeps the first FULL_LINE bytes of a line and drops the others without a word: a line that
 * long is refused, with *n > 0 because the next one may be read. */
static int read_some(int fd, const char *name, text_buffer *out, size_t *n) {
    char bytes[READ_BYTES];
    struct termios mode;
    ssize_t got;
    *n = 0;
    while ((got = read(fd, bytes, sizeof bytes)) < 0)
        if (!wait_for(fd, POLLIN)) return fail(EXIT_IO, "cannot read %s: %s", name, strerror(errno));
    if (out->length + (size_t)got > (size_t)TEXT_LIMIT_MIB << 20)
        return fail(EXIT_CAPACITY, "%s: more than %d MiB of text", name, TEXT_LIMIT_MIB);
    *n = (size_t)got;
    ssize_t line = got > 0 && bytes[got - 1] == '\n' ? got - 1 : got; /* a terminal gives one at a time */
    if (line >= FULL_LINE && !tcgetattr(fd, &mode) && mode.c_lflag & ICANON)
        return fail(EXIT_CAPACITY,
                    "%s: the terminal cuts a line after %d bytes: give long text with -f FILE or through a pipe", name,
                    FULL_LINE);
    append(out, bytes, (size_t)got);
    return EXIT_DONE;
}

static int read_stream(int fd, const char *name, text_buffer *out) {
    size_t n;
    int code;
    append(out, "", 0);
    do code = read_some(fd, name, out, &n);
    while (!code && n > 0);
    return code;
}

int read_file(const char *path, text_buffer *out) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) {
        int code = errno == ENOENT ? EXIT_REFUSED : EXIT_IO;
        return fail(code, "cannot read %s: %s", path, strerror(errno));
    }
    int code = read_stream(fd, path, out);
    close(fd);
    return code;
}

int read_text(const settings *s, text_buffer *out) {
    if (!!s->text + !!s->file + s->from_stdin != 1)
        return fail(EXIT_USAGE, "give the text as exactly one of -p TEXT, -f FILE and -");
    if (s->from_stdin) return read_stream(STDIN_FILENO, "standard input", out);
    if (s->text) {
        append(out, s->text, strlen(s->text));
        return EXIT_DONE;
    }
    return read_file(s->file, out);
}

/* Read more after what the last line left, which moves to the beginning. */
static int read_more(line_reader *r) {
    text_buffer *text = &r->text;
    size_t n;
    text->length -= r->next;
    if (r->next > 0) memmove(text->data, text->data + r->next, text->length);
    r->next = 0;
    int code = read_some(STDIN_FILENO, "standard input", text, &n);
    r->ended = n == 0;
    if (code && n > 0) text->length = 0; /* what was kept of the line */
    return code;
}

int read_line(line_reader *r, char **line, size_t *length) {
    text_buffer *text = &r->text;
    char *end = NULL;
    size_t searched = 0; /* bytes of the line that hold no line feed */
    *line = NULL;
    append(text, "", 0); /* so that there is memory for a line */
    for (;;) {
        size_t left = text->length - r->next;
        if (left > searched) end = memchr(text->data + r->next + searched, '\n', left - searched);
        if (end || r->ended) break;
        searched = left;
        int code = read_more(r);
        if (code) {
            if (!r->ended) *line = text->data;
            return code;
        }
    }
    if (text->length == r->next) return EXIT_DONE;
    *line = text->data + r->next;
    if (!end) end = text->data + text->length;
    r->next = end < text->data + text->length ? (size_t)(end - text->data) + 1 : text->length;
    while (end > *line && end[-1] == '\r') end--;
    *end = '\0';
    *length = (size_t)(end - *line);
    return EXIT_DONE;
}

uint64_t random_bits(void) {
    uint64_t bits;
    if (getrandom(&bits, sizeof bits, 0) == sizeof bits) return bits;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)getpid() << 32 ^ (uint64_t)now.tv_sec << 30 ^ (uint64_t)now.tv_nsec;
}

/* Tell whether a file may come to be at `path`: there is none, or a regular one. /dev/stdout and its like, links into /proc,
 * are streams whatever they lead to. */
static bool may_replace(const char *path, struct stat *st) {
    char target[6]; /* without a NUL */
    if (readlink(path, target, sizeof target) == sizeof target && !memcmp(target, "/proc/", sizeof target))
        return false;
    if (stat(path, st)) st->st_mode = 0;
    return !st->st_mode || S_ISREG(st->st_mode);
}

/* Write a new file under another name and rename it, errno set on failure. mode 0: what the process gives to new files. */
static bool replace_file(const char *path, mode_t mode, const char *data, size_t length) {
    const char *slash = strrchr(path, '/');
    char *temporary = format_text("%.*s.mxdraft-%016llx.part", slash ? (int)(slash - path) + 1 : 0, path,
                                  (unsigned long long)random_bits());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    bool written = fd >= 0 && (!mode || !fchmod(fd, mode & 07777)) && write_all(fd, data, length) && !fsync(fd) &&
                   !rename(temporary, path);
    int reason = errno;
    if (fd >= 0) close(fd);
    if (fd >= 0 && !written) unlink(temporary);
    free(temporary);
    errno = reason;
    return written;
}

int write_file(const char *path, const char *data, size_t length) {
    struct stat st;
    if (!may_replace(path, &st)) return fail(EXIT_IO, "cannot write %s: it is not a regular file", path);
    if (replace_file(path, st.st_mode, data, length)) return EXIT_DONE;
    return fail(EXIT_IO, "cannot write %s: %s", path, strerror(errno));
}
