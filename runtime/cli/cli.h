/* The device's command line. docs/cli.md is the grammar that it shares with the host's (toolchain/mxdraft/cli).
 *
 *   main.c        start here
 *   options.c     grammar: the options of each command, parsing, --help
 *   terminal.c    standard streams, Ctrl-C, error messages
 *   session.c     opening what a command runs on, its memory plan and statistics
 *   cmd_text.c    generate, chat, tokenize
 *   cmd_engine.c  verify, bench, info
 */
#ifndef MXDRAFT_CLI_H
#define MXDRAFT_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mxdraft.h"

/* What a command ends the process with (docs/cli.md). */
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

typedef struct settings {
    const char *bundle, *text, *file, *system, *csv, *json;
    const char *stops[MAX_STOPS];
    uint64_t stop_count;
    uint64_t limit, threads, ctx, top_k, seed, chunk, prompt_tokens, repeat, draft_max, catch_up;
    double temp, top_p, min_p, repeat_penalty, kv_budget;
    double core_fraction; /* < 0: the bundle's */
    unsigned precision, stats, draft, kv; /* index of the chosen word: mxd_precision, -, mxd_draft, mxd_kv */
    bool from_stdin, raw, ignore_eos, dump_tokens, explain, chat, decode, cpu;
} settings;

/* A command returns its exit code, with its errors already printed. */
typedef int command_function(const settings *);
command_function run_generate, run_chat, run_tokenize, run_verify, run_bench, run_info;

/* Parses the arguments of a command line. Returns the command to run, or NULL with *code set: help or version
 * was printed, or an error. */
command_function *parse_arguments(int argc, char **argv, settings *out, int *code);

/* ---- terminal.c ---- */

/* Closed standard streams become unusable ones (so that no file takes their number), a closed pipe becomes an
 * error of write(), and Ctrl-C ends the process with 130. */
void terminal_init(void);
/* Prints "mxdraft: error: …" and returns code. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same for an error of the library; the code is the one of its status. */
int fail_status(const mxd_error *error);
/* Writes to stdout at once. A closed pipe ends the process quietly with 141; other faults return EXIT_IO. */
int emit(const char *data, size_t length);
/* Writes out what printf has buffered, with the same outcomes. */
int flush_output(void);
/* Replaces a file by one with this content; a reader sees the old one or the whole new one. */
int write_file(const char *path, const char *data, size_t length);
/* As printf, into an allocated string. */
char *format_text(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The text's bytes from the one of -p, -f and - that was given, with a NUL behind them; *data is allocated, or
 * NULL on failure. */
int read_text(const settings *s, char **data, size_t *length);
/* While on, the first Ctrl-C is only noted, for interrupted() to tell; the second ends the process. */
void interrupt_deferred(bool on);
bool interrupted(void);
/* malloc that ends the process with EXIT_CAPACITY instead of returning NULL. */
void *allocate(size_t size);

/* ---- session.c ---- */

/* What a command opens, in this order; zeros are what is not open. */
typedef struct session {
    mxd_model *model;
    mxd_engine *engine;
    mxd_seq *seq;
} session;

/* Each returns an exit code, with the error already printed; session_close() closes what is open. */
int open_model(const char *path, session *out);
/* Prints the memory plan on stderr first; max_rows 0 is the library's default. */
int open_engine(const settings *s, uint32_t max_rows, session *out);
/* What steps cost on this machine, from the user's cache or measured now: draft lengths rest on it. */
int know_costs(const session *run);
int open_seq(const settings *s, session *out);
void session_close(session *s);
/* A memory plan as one line without its end, allocated. */
char *plan_line(const mxd_plan *plan);
/* The statistics of the sequence as JSON, allocated. */
char *stats_json(const session *s);
/* Where the value of a key of that JSON begins. */
const char *json_value(const char *json, const char *key);
double json_number(const char *json, const char *key);

#endif
