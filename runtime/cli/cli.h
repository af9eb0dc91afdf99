/* The device's command line. docs/cli.md is the grammar that it shares with the host's (toolchain/mxdraft/cli).
 *
 *   main.c        start here
 *   options.c     grammar: the options of each command, parsing, --help
 *   terminal.c    standard streams, Ctrl-C, error messages
 *   session.c     model, engine and sequence of a command, and its memory plan
 *   cmd_text.c    generate, chat, tokenize
 *   cmd_engine.c  verify, bench, info
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
    const char *bundle, *text, *file, *system, *csv, *json;
    const char *stops[MAX_STOPS];
    uint64_t stop_count;
    uint64_t limit, threads, ctx, top_k, seed, chunk, prompt_tokens, repeat, draft_max, catch_up;
    double temp, top_p, min_p, repeat_penalty, kv_budget;
    double core_fraction; /* < 0: the bundle's */
    uint32_t precision, kv, stats; /* mxd_precision, mxd_kv, STATS_... */
    uint32_t draft;       /* mxd_draft; of bench also DRAFT_ALL */
    bool from_stdin, raw, ignore_eos, dump_tokens, explain, chat, decode, cpu;
} settings;

/* What a command opens, in this order; NULL: not open. */
typedef struct session {
    mxd_model *model;
    mxd_engine *engine;
    mxd_seq *seq;
} session;

/* Run a command with what it opens in *run, which the caller closes: print its errors and return its exit code. */
typedef int command_function(const settings *, session *run);
command_function run_generate, run_chat, run_tokenize, run_verify, run_bench, run_info;

/* Parse a command line into *out and return the command to run; NULL with *code set after --help, --version or an
 * error, which are printed. */
command_function *parse_arguments(int argc, char **argv, settings *out, int *code);

/* ---- terminal.c ---- */

/* Replace closed standard streams by unusable ones (so that no file takes their number), make a closed pipe an error of
 * write(), and let Ctrl-C end the process with 130. */
void terminal_init(void);
/* Print "mxdraft: error: ..." and return `code`. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Print an error of the library and return the exit code for its status. */
int fail_status(const mxd_error *error);
/* Write to stdout at once. A closed pipe ends the process quietly with 141; return EXIT_IO after other faults. */
int emit(const char *data, size_t length);
/* Write out what printf has buffered, with the same outcomes. */
int flush_output(void);
/* Replace the file at `path` by one with this content: a reader sees the old one or the whole new one. */
int write_file(const char *path, const char *data, size_t length);
/* Print to an allocated string. */
char *format_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* Read the text from the one of -p, -f and - that was given; *data is allocated and has a NUL after its *length bytes,
 * or is NULL after a failure. */
int read_text(const settings *s, char **data, size_t *length);
/* While `on`, only note the first Ctrl-C, which interrupted() then tells; the second ends the process. */
void interrupt_deferred(bool on);
bool interrupted(void);
/* Allocate, or end the process with EXIT_CAPACITY. */
void *allocate(size_t size);
void *reallocate(void *memory, size_t size);

/* ---- session.c ---- */

/* Each prints its error and returns an exit code; session_close() closes what is open. */
int open_model(const char *path, session *out);
/* Print the memory plan on stderr, then open the engine; max_rows 0: the library's default. */
int open_engine(const settings *s, uint32_t max_rows, session *out);
/* Take what steps cost on this machine from the user's cache, or measure it: draft lengths rest on it. */
int know_costs(const session *run);
int open_seq(const settings *s, session *out);
void session_close(session *s);
/* Return a memory plan as one line without its end, allocated. */
char *plan_line(const mxd_plan *plan);

#endif
