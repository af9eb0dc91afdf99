/* SPDX-License-Identifier: Apache-2.0 */
/* Random command lines for the parser of the device's command line: arguments SECONDS [--seed S] [--runs N]. Nothing may be
 * read out of bounds (build with AddressSanitizer); what is refused ends with code 2, and what is accepted is in range.
 *
 * Run number i depends on S + i alone: a failure prints the --seed that repeats it, with --runs 1. */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../runtime/cli/cli.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { MOST = 40, LONG = 600 };

static const char *const words[] = {"generate",
                                    "chat",
                                    "serve",
                                    "tokenize",
                                    "verify",
                                    "bench",
                                    "info",
                                    "-m",
                                    "-p",
                                    "-f",
                                    "-",
                                    "--",
                                    "-t",
                                    "-n",
                                    "--ctx",
                                    "--precision",
                                    "--core-fraction",
                                    "--catch-up",
                                    "--kv",
                                    "--kv-budget",
                                    "--temp",
                                    "--top-k",
                                    "--top-p",
                                    "--min-p",
                                    "--repeat-penalty",
                                    "--seed",
                                    "--stop",
                                    "--ignore-eos",
                                    "--json-schema",
                                    "--draft",
                                    "--draft-max",
                                    "--raw",
                                    "--system",
                                    "--dump-tokens",
                                    "--explain",
                                    "--stats",
                                    "--chat",
                                    "--decode",
                                    "--chunk",
                                    "--prompt-tokens",
                                    "--repeat",
                                    "--csv",
                                    "--json",
                                    "--cpu",
                                    "--host",
                                    "--port",
                                    "--api-key-file",
                                    "--allow-anyone",
                                    "--cors",
                                    "--alias",
                                    "--parallel",
                                    "--parked",
                                    "--help",
                                    "-h",
                                    "--version",
                                    "auto",
                                    "base",
                                    "full",
                                    "int8",
                                    "tiered",
                                    "all",
                                    "none",
                                    "json",
                                    "0",
                                    "1",
                                    "2",
                                    "16",
                                    "64",
                                    "512",
                                    "4096",
                                    "0.5",
                                    "1e-3",
                                    "1e999",
                                    "0x10",
                                    "nan",
                                    "-1",
                                    "+1",
                                    "1.",
                                    ".5",
                                    "1e",
                                    "8.25",
                                    "10.1",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "99999999999999999999999",
                                    "",
                                    " 1",
                                    "1 ",
                                    "\xff",
                                    "\x1b[2J",
                                    "=",
                                    "a.mxb"};

/* In place of the commands themselves. */
#define COMMAND(name)                                 \
    int run_##name(const settings *s, session *run) { \
        (void)s, (void)run;                           \
        return EXIT_DONE;                             \
    }
COMMAND(generate)
COMMAND(chat)
COMMAND(serve)
COMMAND(tokenize)
COMMAND(verify)
COMMAND(bench)
COMMAND(info)

static uint64_t seed, rng_state, accepted, refused, told;
static int report; /* stderr */

static size_t below(size_t n) { /* SplitMix64 */
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (size_t)((z ^ z >> 31) % n);
}

static const char *word(void) {
    return words[below(sizeof words / sizeof *words)];
}

/* Return an allocated argument that ends where its memory does. */
static char *argument(void) {
    char text[2 * LONG] = "";
    strcpy(text, word());
    switch (below(12)) {
    case 0: strcat(strcat(text, "="), word()); break;
    case 1: strcat(text, word()); break;
    case 2:
        if (*text) text[below(strlen(text))] = (char)(1 + below(255));
        break;
    case 3: memset(text + strlen(text), '1' + (int)below(40), below(LONG)); break;
    case 4: text[below(strlen(text) + 1)] = '\0'; break;
    default: break;
    }
    return strdup(text);
}

static void tell_seed(void) {
    dprintf(report, "FAILED --seed %llu\n", (unsigned long long)seed);
}

/* Let what the parser prints go nowhere, and reports of sanitizers to stderr. */
static void keep_quiet(void) {
    int out = dup(1), nowhere = open("/dev/null", O_WRONLY);
    report = dup(2);
    if (out < 0 || report < 0 || nowhere < 0 || dup2(nowhere, 1) < 0 || dup2(nowhere, 2) < 0) exit(3);
    stdout = fdopen(out, "w");
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_set_report_fd((void *)(intptr_t)report);
    __sanitizer_set_death_callback(tell_seed);
#endif
}

__attribute__((noreturn)) static void fault(const char *what, int argc, char **argv) {
    tell_seed();
    dprintf(report, "%s:", what);
    for (int i = 1; i < argc; i++) dprintf(report, " '%s'", argv[i]);
    dprintf(report, "\n");
    abort();
}

static bool in(double x, double low, double high) {
    return x >= low && x <= high; /* not NaN */
}

/* Options that a command does not have stay 0. */
static bool in_range(const settings *s) {
    return s->threads <= 64 && s->stop_count <= MAX_STOPS && s->top_k <= 1 << 20 && s->ctx <= 1 << 20 &&
           s->limit <= 1 << 20 && s->draft_max <= 15 && s->catch_up <= 32 && s->chunk <= 512 && s->port <= 65535 &&
           s->parallel <= 32 && s->parked <= 32 && s->repeat <= 1000 && in(s->temp, 0, 100) && in(s->top_p, 0, 1) &&
           in(s->min_p, 0, 1) && in(s->repeat_penalty, 0, 10) && in(s->kv_budget, 0, 8.25) &&
           in(s->core_fraction, -1, 1) && mxd_precision_name(s->precision) && mxd_kv_name(s->kv) &&
           (mxd_draft_name(s->draft) || s->draft == DRAFT_ALL) && s->stats <= STATS_JSON;
}

static void run(void) {
    char *argv[MOST + 1] = {strdup("mxdraft")};
    int argc = 1, code = -1;
    settings s;
    if (below(10)) argv[argc++] = strdup(words[below(7)]);
    if (below(4)) argv[argc++] = strdup("-m"), argv[argc++] = strdup("b.mxb");
    for (size_t n = below(below(5) ? 5 : MOST - 4); n > 0; n--) argv[argc++] = argument();
    command_function *command = parse_arguments(argc, argv, &s, &code);
    if (command && (code != EXIT_DONE || !in_range(&s))) fault("accepted", argc, argv);
    if (!command && code != EXIT_USAGE && code != EXIT_DONE) fault("another code", argc, argv);
    if (command) accepted++;
    else if (code == EXIT_USAGE) refused++;
    else told++;
    for (uint64_t i = 0; command && i < s.stop_count; i++)
        if (strlen(s.stops[i]) > 2 * LONG) fault("a stop", argc, argv);
    for (int i = 0; i < argc; i++) free(argv[i]);
}

int main(int argc, char **argv) {
    uint64_t first = 1, runs = UINT64_MAX, done = 0;
    if (argc < 2) return 2;
    double seconds = atof(argv[1]);
    for (int at = 2; at + 1 < argc; at += 2) {
        uint64_t value = strtoull(argv[at + 1], NULL, 10);
        if (!strcmp(argv[at], "--seed")) first = value;
        else if (!strcmp(argv[at], "--runs")) runs = value;
        else return 2;
    }
    keep_quiet();
    time_t start = time(NULL);
    for (; done < runs && difftime(time(NULL), start) < seconds; done++) {
        rng_state = (seed = first + done) * 0xd1342543de82ef95u;
        run();
    }
    printf("arguments: %llu runs, %llu accepted, %llu refused, %llu told\n", (unsigned long long)done,
           (unsigned long long)accepted, (unsigned long long)refused, (unsigned long long)told);
    return 0;
}
