/* Standard streams, Ctrl-C and error messages, the same in both command lines (docs/cli.md). */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TEXT_LIMIT_MIB = 16 }; /* far above any context, so that an endless stream ends in an error */

static volatile sig_atomic_t defer_interrupt;
static volatile sig_atomic_t interrupt_requested;

static void on_interrupt(int signal_number) {
    (void)signal_number;
    if (interrupt_requested || !defer_interrupt) _exit(EXIT_INTERRUPTED);
    interrupt_requested = 1;
}

void terminal_init(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0) (void)open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGPIPE, &ignore, NULL);
    struct sigaction interrupt = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &interrupt, NULL);
}

void interrupt_deferred(bool on) {
    defer_interrupt = on;
}

bool interrupted(void) {
    return interrupt_requested;
}

int fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    fputs("mxdraft: error: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return code;
}

static int exit_code(int32_t status) {
    switch (status) {
    case MXD_OK: return EXIT_DONE;
    case MXD_ERR_ARGUMENT:
    case MXD_ERR_UNSUPPORTED:
    case MXD_ERR_BUFFER: return EXIT_USAGE;
    case MXD_ERR_IO: return EXIT_IO;
    case MXD_ERR_MEMORY:
    case MXD_ERR_CONTEXT: return EXIT_CAPACITY;
    case MXD_ERR_NUMERIC:
    case MXD_ERR_MISMATCH: return EXIT_NUMERIC;
    default: return EXIT_REFUSED; /* MXD_BAD_… */
    }
}

int fail_status(const mxd_error *error) {
    return fail(exit_code(error->status), "%s", error->message);
}

/* End a write to stdout that failed with errno. */
static int output_failed(void) {
    if (errno == EPIPE) _exit(EXIT_PIPE_CLOSED);
    return fail(EXIT_IO, "cannot write to standard output: %s", strerror(errno));
}

/* Write all of data[length]; return false with errno set if that fails. */
static bool write_all(int fd, const char *data, size_t length) {
    while (length > 0) {
        ssize_t written = write(fd, data, length);
        if (written < 0 && errno != EINTR) return false;
        if (written > 0) {
            data += written;
            length -= (size_t)written;
        }
    }
    return true;
}

int emit(const char *data, size_t length) {
    return write_all(STDOUT_FILENO, data, length) ? EXIT_DONE : output_failed();
}

int write_file(const char *path, const char *data, size_t length) {
    char *temporary = format_text("%s.%ld.part", path, (long)getpid());
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    bool written = fd >= 0 && write_all(fd, data, length) && fsync(fd) == 0 && rename(temporary, path) == 0;
    int code = written ? EXIT_DONE : fail(EXIT_IO, "cannot write %s: %s", path, strerror(errno));
    if (fd >= 0) close(fd);
    if (fd >= 0 && !written) unlink(temporary);
    free(temporary);
    return code;
}

int flush_output(void) {
    return fflush(stdout) == 0 ? EXIT_DONE : output_failed();
}

char *format_text(const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    size_t size = (size_t)vsnprintf(NULL, 0, format, args) + 1;
    char *text = allocate(size);
    vsnprintf(text, size, format, again);
    va_end(again);
    va_end(args);
    return text;
}

void *reallocate(void *memory, size_t size) {
    void *larger = realloc(memory, size > 0 ? size : 1);
    if (!larger) exit(fail(EXIT_CAPACITY, "out of memory"));
    return larger;
}

void *allocate(size_t size) {
    return reallocate(NULL, size);
}

static int read_stream(int fd, const char *name, char **data, size_t *length) {
    const size_t limit = (size_t)TEXT_LIMIT_MIB << 20;
    size_t capacity = 4096, size = 0;
    char *buffer = allocate(capacity);
    for (;;) {
        ssize_t got = read(fd, buffer + size, capacity - size - 1);
        if (got == 0) break;
        if (got < 0) {
            if (errno == EINTR) continue;
            free(buffer);
            return fail(EXIT_IO, "cannot read %s: %s", name, strerror(errno));
        }
        size += (size_t)got;
        if (size > limit) {
            free(buffer);
            return fail(EXIT_CAPACITY, "%s: more than %d MiB of text", name, TEXT_LIMIT_MIB);
        }
        if (size + 1 >= capacity) buffer = reallocate(buffer, capacity *= 2);
    }
    buffer[size] = '\0';
    *data = buffer;
    *length = size;
    return EXIT_DONE;
}

int read_text(const settings *s, char **data, size_t *length) {
    *data = NULL;
    if (!!s->text + !!s->file + s->from_stdin != 1)
        return fail(EXIT_USAGE, "give the text as exactly one of -p TEXT, -f FILE and -");
    if (s->from_stdin) return read_stream(STDIN_FILENO, "standard input", data, length);
    if (s->text) {
        *length = strlen(s->text);
        *data = format_text("%s", s->text);
        return EXIT_DONE;
    }
    int fd = open(s->file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        int code = errno == ENOENT ? EXIT_REFUSED : EXIT_IO;
        return fail(code, "cannot read %s: %s", s->file, strerror(errno));
    }
    int code = read_stream(fd, s->file, data, length);
    close(fd);
    return code;
}
