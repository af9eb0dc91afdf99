/* SPDX-License-Identifier: Apache-2.0 */
/* The device's command line. docs/cli.md is the grammar that it shares with the host's (toolchain/mxdraft/cli).
 *
 *   main.c        start here
 *   options.c     grammar: the options of each command, parsing, --help
 *   terminal.c    standard streams, signals, messages
 *   files.c       reading text, writing files
 *   session.c     model, engine and sequence of a command, and its memory plan
 *   cmd_text.c    generate, chat, tokenize
 *   cmd_engine.c  verify, bench, info
 *   cmd_serve.c   serve; the server itself is in ../serve
 */
#ifndef MXDRAFT_CLI_H
#define MXDRAFT_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mxdraft.h"

/* Exit codes (docs/cli.md). */
enum {
    EXIT_DONE = 0,
    EXIT_USAGE = 2,
    EXIT_REFUSED = 3,
    EXIT_CAPACITY = 4,
    EXIT_NUMERIC = 5,
    EXIT_IO = 6,
    EXIT_INTERRUPTED = 130,
    EXIT_PIPE_CLOSED = 141
};

/* ---- options.c ---- */

enum { MAX_STOPS = 16 };
enum { STATS_NONE, STATS_TEXT, STATS_JSON };
enum { DRAFT_ALL = MXD_DRAFT_MODEL + 1 };

/* The values of all options. */
typedef struct settings {
    const char *bundle, *text, *file, *system, *csv, *json, *schema;
    const char *host, *api_key_file, *cors, *alias, *wyoming;
    const char *stops[MAX_STOPS];
    uint64_t stop_count;
    uint64_t limit, threads, ctx, top_k, seed, chunk, prompt_tokens, repeat, draft_max, catch_up;
    uint64_t port, parallel, parked;
    uint64_t sequences; /* of the engine; 0: one. No option */
    double temp, top_p, min_p, repeat_penalty, kv_budget;
    double core_fraction;          /* < 0: the bundle's */
    bool seeded;                   /* --seed was given */
    uint32_t precision, kv, stats; /* mxd_precision, mxd_kv, STATS_... */
    uint32_t draft;                /* mxd_draft; of bench also DRAFT_ALL */
    bool from_stdin, raw, ignore_eos, dump_tokens, explain, chat, decode, cpu, allow_anyone;
} settings;

/* What a command opens, in this order; NULL: not open. */
typedef struct session {
    mxd_model *model;
    mxd_engine *engine;
    mxd_grammar *grammar; /* of seq */
    mxd_seq *seq;
    uint64_t seed; /* of seq */
} session;

/* Run a command with what it opens in *run, which the caller closes: print its errors and return its exit code. */
typedef int command_function(const settings *, session *run);
command_function run_generate, run_chat, run_tokenize, run_verify, run_bench, run_info, run_serve;

/* Parse a command line into *out and return the command to run; NULL with *code set after --help, --version or an
 * error, which are printed. */
command_function *parse_arguments(int argc, char **argv, settings *out, int *code);

/* ---- terminal.c ---- */

/* Replace closed standard streams by unusable ones (so that no file takes their number), make a closed pipe and a limit
 * on file sizes errors of write(), and let Ctrl-C end the process with 130. */
void terminal_init(void);
/* Print "mxdraft: error: ..." on stderr, control characters in it as \xNN, and return `code`. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Print "mxdraft: note: ..." in the same way. */
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Write to stderr at once. Losing that is no reason to stop. */
void tell(const char *data, size_t length);
/* After a call on fd failed with errno: return true if it is to be repeated, once `events` (poll(2)) have come where it
 * would have had to wait. */
bool wait_for(int fd, short events);
/* Write all of data[length], however long that takes; return false with errno set if it fails. */
bool write_all(int fd, const char *data, size_t length);
/* Return an allocated copy of a text from a file or command line, control characters as \xNN. */
char *printable(const char *text);
/* Print an error of the library and return the exit code for its status. */
int fail_status(const mxd_error *error);
/* Write to stdout at once. A closed pipe ends the process quietly with 141; return EXIT_IO after other faults. */
int emit(const char *data, size_t length);
/* Print to an allocated string. */
char *format_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* While `on`, only note the first Ctrl-C, which interrupted() then tells; the second ends the process. */
void interrupt_deferred(bool on);
bool interrupted(void);
/* Allocate, or end the process with EXIT_CAPACITY. */
void *allocate(size_t size);
void *reallocate(void *memory, size_t size);
/* Text that grows; begin with zeros. */
typedef struct text_buffer {
    char *data; /* allocated, with a NUL after it; NULL while empty */
    size_t length, capacity;
} text_buffer;
void append(text_buffer *t, const char *data, size_t length);
void append_text(text_buffer *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Write the text to stdout as emit() does, and free it. */
int emit_buffer(text_buffer *t);

/* ---- files.c ---- */

/* Append to *out the text from the one of -p, -f and - that was given. */
int read_text(const settings *s, text_buffer *out);
/* Append to *out the content of a file, pipe or device. */
int read_file(const char *path, text_buffer *out);
/* Standard input by lines; begin with zeros, free text.data. */
typedef struct line_reader {
    text_buffer text;
    size_t next; /* where the next line begins */
    bool ended;
} line_reader;
/* Read a line; *line has a NUL after its *length bytes in place of its end, until the next call, and is NULL at the end of
 * the input and after a failure. EXIT_CAPACITY with another *line: only this line is lost. */
int read_line(line_reader *r, char **line, size_t *length);
/* Replace the file at `path` by one with this content: a reader sees the old one or the whole new one. What a link there
 * leads to stays as it is; a directory, device or pipe is an error. */
int write_file(const char *path, const char *data, size_t length);
/* Return a number that nobody can foresee. */
uint64_t random_bits(void);

/* ---- session.c ---- */

/* Each prints its error and returns an exit code; session_close() closes what is open. */
int open_model(const char *path, session *out);
/* Plan the memory of an engine; max_rows 0: the library's default. */
int plan_engine(const settings *s, uint32_t max_rows, const session *run, mxd_plan *out);
/* Print the memory plan on stderr, then open the engine; max_rows 0: the library's default. */
int open_engine(const settings *s, uint32_t max_rows, session *out);
/* Take what steps cost on this machine from the user's cache, or measure it: draft lengths rest on it. */
int know_costs(const session *run);
/* Open the sequence, with its grammar; draw a seed, and tell it, where the text is drawn and none was given. */
int open_seq(const settings *s, session *out);
void session_close(session *s);
/* Append a memory plan as one line. */
void append_plan(text_buffer *t, const mxd_plan *plan);

#endif
