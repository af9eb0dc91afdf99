/* SPDX-License-Identifier: Apache-2.0 */
/* Standard streams, signals and messages, the same in both command lines (docs/cli.md). */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MESSAGE_BYTES = 8192 };

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
    sigaction(SIGXFSZ, &ignore, NULL);
    struct sigaction interrupt = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &interrupt, NULL);
}

void interrupt_deferred(bool on) {
    defer_interrupt = on;
}

bool interrupted(void) {
    return interrupt_requested;
}

/* ---- writing ---- */

bool wait_for(int fd, short events) {
    if (errno == EINTR) return true;
    if (errno != EAGAIN) return false;
    struct pollfd file = {.fd = fd, .events = events};
    return poll(&file, 1, -1) >= 0 || errno == EINTR;
}

bool write_all(int fd, const char *data, size_t length) {
    while (length > 0) {
        ssize_t written = write(fd, data, length);
        if (written < 0 && !wait_for(fd, POLLOUT)) return false;
        if (written > 0) {
            data += written;
            length -= (size_t)written;
        }
    }
    return true;
}

/* End a write to stdout that failed with errno. */
static int output_failed(void) {
    if (errno == EPIPE) _exit(EXIT_PIPE_CLOSED);
    return fail(EXIT_IO, "cannot write to standard output: %s", strerror(errno));
}

int emit(const char *data, size_t length) {
    return write_all(STDOUT_FILENO, data, length) ? EXIT_DONE : output_failed();
}

void tell(const char *data, size_t length) {
    (void)write_all(STDERR_FILENO, data, length);
}

/* Return whether text[length] begins with a control character: its bytes, 1 or 2 as UTF-8, else 0. */
static size_t control_character(const char *text, size_t length) {
    unsigned char first = (unsigned char)text[0], second = length > 1 ? (unsigned char)text[1] : 0;
    if (first < 0x20 || first == 0x7F) return 1;
    return first == 0xC2 && second >= 0x80 && second < 0xA0 ? 2 : 0;
}

/* Copy text[length] to out (4 bytes for each, and a NUL), control characters as \xNN, and return the copy's length.
 * A line feed stays one where `lines` are. */
static size_t escape(const char *text, size_t length, bool lines, char *out) {
    char *to = out;
    for (size_t i = 0, width; i < length; i += width) {
        width = lines && text[i] == '\n' ? 0 : control_character(text + i, length - i);
        if (width > 0) {
            to += sprintf(to, "\\x%02x", (unsigned char)text[i + width - 1]);
        } else {
            *to++ = text[i];
            width = 1;
        }
    }
    *to = '\0';
    return (size_t)(to - out);
}

char *printable(const char *text) {
    size_t length = strlen(text);
    char *out = allocate(4 * length + 1);
    escape(text, length, false, out);
    return out;
}

/* Write a message of one line to stderr. Without allocating: it may be that there is no memory. */
static void tell_line(const char *kind, const char *format, va_list args) {
    char text[MESSAGE_BYTES], line[4 * MESSAGE_BYTES + 32];
    vsnprintf(text, sizeof text, format, args);
    size_t used = (size_t)sprintf(line, "mxdraft: %s: ", kind);
    used += escape(text, strlen(text), true, line + used);
    line[used++] = '\n';
    tell(line, used);
}

int fail(int code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell_line("error", format, args);
    va_end(args);
    return code;
}

void note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    tell_line("note", format, args);
    va_end(args);
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

/* ---- memory ---- */

void *reallocate(void *memory, size_t size) {
    void *larger = realloc(memory, size > 0 ? size : 1);
    if (!larger) exit(fail(EXIT_CAPACITY, "out of memory"));
    return larger;
}

void *allocate(size_t size) {
    return reallocate(NULL, size);
}

void append(text_buffer *t, const char *data, size_t length) {
    if (!t->data || t->length + length >= t->capacity) {
        t->capacity = 2 * (t->length + length) + 64;
        t->data = reallocate(t->data, t->capacity);
    }
    if (data && length > 0) memcpy(t->data + t->length, data, length);
    t->length += length;
    t->data[t->length] = '\0';
}

static void append_args(text_buffer *t, const char *format, va_list args) {
    va_list again;
    va_copy(again, args);
    size_t size = (size_t)vsnprintf(NULL, 0, format, args) + 1;
    char *text = allocate(size);
    vsnprintf(text, size, format, again);
    va_end(again);
    append(t, text, size - 1);
    free(text);
}

void append_text(text_buffer *t, const char *format, ...) {
    va_list args;
    va_start(args, format);
    append_args(t, format, args);
    va_end(args);
}

char *format_text(const char *format, ...) {
    text_buffer t = {0};
    va_list args;
    va_start(args, format);
    append_args(&t, format, args);
    va_end(args);
    return t.data;
}

int emit_buffer(text_buffer *t) {
    int code = emit(t->data, t->length);
    free(t->data);
    *t = (text_buffer){0};
    return code;
}
