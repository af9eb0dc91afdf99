/* SPDX-License-Identifier: Apache-2.0 */
/* The grammar: options of each command, parsing, --help (mirror: toolchain/mxdraft/cli/_options.py). */
#include "cli.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOKENS = 1 << 20, MAX_GROUPS = 7 };

typedef enum kind { END, FLAG, TEXT, TEXTS, WHOLE, REAL, WORD } kind;

/* Return the word of a value, NULL after the last one. */
typedef const char *word_function(uint32_t value);

static const char *stats_word(uint32_t value) {
    static const char *const words[] = {[STATS_NONE] = "none", [STATS_TEXT] = "text", [STATS_JSON] = "json"};
    return value < sizeof words / sizeof *words ? words[value] : NULL;
}

static const char *compared_draft_word(uint32_t value) {
    return value == DRAFT_ALL ? "all" : mxd_draft_name(value);
}

/* An option; its value goes to `offset` in settings. */
typedef struct option {
    const char *name;
    kind kind;
    size_t offset;
    const char *metavar; /* what --help shows for the value; NULL: nothing, or the words */
    const char *initial; /* the default, parsed like a value; NULL: none */
    uint64_t low, high;  /* WHOLE */
    double min, max;     /* REAL */
    word_function *word; /* WORD */
    size_t given;        /* the flag in settings that tells that it was given; 0: none */
    const char *help;
} option;

/* clang-format off */
#define OPTION(n, k, field, h, ...) {.name = n, .kind = k, .offset = offsetof(settings, field), .help = h, __VA_ARGS__}
#define FLAG_OPTION(n, field, h) OPTION(n, FLAG, field, h, .initial = NULL)
#define TEXT_OPTION(n, field, m, h, ...) OPTION(n, TEXT, field, h, .metavar = m, __VA_ARGS__)
#define WHOLE_OPTION(n, field, l, u, i, h) OPTION(n, WHOLE, field, h, .metavar = "N", .low = l, .high = u, .initial = i)
#define REAL_OPTION(n, field, l, u, i, h) OPTION(n, REAL, field, h, .metavar = "X", .min = l, .max = u, .initial = i)
#define WORD_OPTION(n, field, w, i, h) OPTION(n, WORD, field, h, .word = w, .initial = i)
#define LIMIT_OPTION(low, initial) \
    WHOLE_OPTION("-n", limit, low, MAX_TOKENS, initial, "Most tokens; 0 = until context is full.")
#define STATS_OPTION(initial) WORD_OPTION("--stats", stats, stats_word, initial, "Statistics on stderr.")
#define END_OPTION {.kind = END}

static const option model_options[] = {
    TEXT_OPTION("-m", bundle, "BUNDLE", "Bundle: file (.mxb) or pulled name."),
    END_OPTION
};
static const option engine_options[] = {
    WHOLE_OPTION("-t", threads, 0, 64, "0", "Threads; 0 = what the machine offers."),
    WHOLE_OPTION("--ctx", ctx, 0, MAX_TOKENS, "0", "Context; 0 = min(2048, the model's)."),
    WORD_OPTION("--precision", precision, mxd_precision_name, "auto", "Weight planes; auto = full where it matters."),
    REAL_OPTION("--core-fraction", core_fraction, 0, 1, NULL,
                "Under auto: tokens at full precision, 0..1; unset: the bundle's."),
    WHOLE_OPTION("--catch-up", catch_up, 1, 32, NULL,
                 "Under auto: most tokens between full passes; unset: the bundle's."),
    END_OPTION
};
static const option cache_options[] = {
    WORD_OPTION("--kv", kv, mxd_kv_name, "auto", "Format of the KV cache; auto = f16."),
    REAL_OPTION("--kv-budget", kv_budget, 0, 8.25, "0", "Tiered: mean bits a value, context full; 0 = bundle's."),
    END_OPTION
};
static const option text_options[] = {
    TEXT_OPTION("-p", text, "TEXT", "The text itself."),
    TEXT_OPTION("-f", file, "FILE", "Read the text from a file. A bare - reads stdin."),
    END_OPTION
};
static const option sampling_options[] = {
    REAL_OPTION("--temp", temp, 0, 100, "0", "Temperature; 0 = greedy."),
    WHOLE_OPTION("--top-k", top_k, 0, MAX_TOKENS, "0", "Keep the k likeliest; 0 = off."),
    REAL_OPTION("--top-p", top_p, 0, 1, "1", "Keep this probability mass; 1 = off."),
    REAL_OPTION("--min-p", min_p, 0, 1, "0", "Keep what has this share of the top probability; 0 = off."),
    REAL_OPTION("--repeat-penalty", repeat_penalty, 0.1, 10, "1", "Against repetition; 1 = off."),
    OPTION("--seed", WHOLE, seed, "Seed of the sampling noise; unset: a new one in each run.", .metavar = "N",
           .high = UINT64_MAX, .given = offsetof(settings, seeded)),
    OPTION("--stop", TEXTS, stops, "Stop before this text; may be repeated.", .metavar = "TEXT"),
    FLAG_OPTION("--ignore-eos", ignore_eos, "Go on after end-of-sequence tokens."),
    TEXT_OPTION("--json-schema", schema, "FILE", "Answer with a document of this JSON schema."),
    END_OPTION
};
static const option draft_options[] = {
    WORD_OPTION("--draft", draft, mxd_draft_name, "auto", "Who drafts; never changes the text, only the speed."),
    WHOLE_OPTION("--draft-max", draft_max, 1, 15, "8", "Most drafted tokens in a step."),
    END_OPTION
};
static const option generate_options[] = {
    LIMIT_OPTION(0, "128"),
    FLAG_OPTION("--raw", raw, "Continue the text as it is, without the chat template."),
    TEXT_OPTION("--system", system, "TEXT", "System message before the prompt."),
    FLAG_OPTION("--dump-tokens", dump_tokens, "Print prompt and generated ids on stderr."),
    FLAG_OPTION("--explain", explain, "Colour the text that was drafted and accepted."),
    STATS_OPTION("text"),
    END_OPTION
};
static const option chat_options[] = {
    LIMIT_OPTION(0, "512"),
    TEXT_OPTION("--system", system, "TEXT", "System message at the start."),
    STATS_OPTION("none"),
    END_OPTION
};
static const option tokenize_options[] = {
    FLAG_OPTION("--chat", chat, "Through the chat template, as generate does without --raw."),
    FLAG_OPTION("--decode", decode, "Decode instead: ids, separated by white space, to text."),
    END_OPTION
};
static const option verify_options[] = {
    WHOLE_OPTION("--chunk", chunk, 1, 512, "64", "Rows of one step; never changes the digest."),
    END_OPTION
};
static const option bench_options[] = {
    WHOLE_OPTION("--prompt-tokens", prompt_tokens, 1, MAX_TOKENS, "128", "Prompt length."),
    WHOLE_OPTION("-n", limit, 2, MAX_TOKENS, "64", "Tokens to generate."),
    WORD_OPTION("--draft", draft, compared_draft_word, "off", "Also compare drafting with plain decoding."),
    WHOLE_OPTION("--repeat", repeat, 1, 1000, "3", "Measured runs, after one to warm up."),
    TEXT_OPTION("--csv", csv, "FILE", "Write the results as CSV; - = instead of the table."),
    TEXT_OPTION("--json", json, "FILE", "Write the results as JSON; - = instead of the table."),
    END_OPTION
};
static const option info_options[] = {
    FLAG_OPTION("--cpu", cpu, "Also print the function bound to each operation."),
    END_OPTION
};

static const option serve_options[] = {
    TEXT_OPTION("--host", host, "ADDRESS", "Address to listen on.", .initial = "127.0.0.1"),
    WHOLE_OPTION("--port", port, 0, 65535, "8080", "Port to listen on; 0 = a free one."),
    TEXT_OPTION("--api-key-file", api_key_file, "FILE", "Ask for the key that is this file's first line."),
    FLAG_OPTION("--allow-anyone", allow_anyone, "Listen on the network without a key."),
    TEXT_OPTION("--wyoming", wyoming, "HOST:PORT", "Also answer voice assistants there, by Wyoming's events."),
    TEXT_OPTION("--cors", cors, "ORIGIN", "Let pages of this origin ask; * = any."),
    TEXT_OPTION("--alias", alias, "NAME", "Name of the model; unset: its file's."),
    WHOLE_OPTION("--parallel", parallel, 1, 32, "4", "Most answers at once; fewer if memory is short."),
    WHOLE_OPTION("--parked", parked, 0, 32, "4", "Sequences kept for prompts that begin alike."),
    END_OPTION
};

typedef struct command {
    const char *name;
    command_function *run;
    bool needs_bundle;
    bool takes_text; /* "-" is an argument */
    const option *groups[MAX_GROUPS];
    const char *summary;
    const char *help;
    const char *example;
} command;

static const command commands[] = {
    {"generate", run_generate, true, true,
     {model_options, text_options, generate_options, engine_options, cache_options, sampling_options, draft_options},
     "continue a prompt",
     "Continue a prompt: one user message through the chat template, or with --raw the plain text.",
     "-m model.mxb -p \"Why is the sky blue?\""},
    {"chat", run_chat, true, false,
     {model_options, chat_options, engine_options, cache_options, sampling_options, draft_options},
     "talk in turns",
     "Talk in turns: one line of stdin a message; /reset starts anew, /quit or end of input ends.",
     "-m model.mxb"},
    {"serve", run_serve, true, false,
     {model_options, serve_options, engine_options, cache_options, sampling_options, draft_options},
     "answer programs over HTTP",
     "Answer over HTTP as OpenAI's API does (docs/serve.md); sampling options are defaults for requests.",
     "-m model.mxb --port 8080"},
    {"tokenize", run_tokenize, true, true, {model_options, text_options, tokenize_options},
     "text to token ids and back",
     "Print the token ids of a text on one line; nothing is added to the text.",
     "-m model.mxb -p \"Hello there\""},
    {"verify", run_verify, true, false, {model_options, engine_options, verify_options},
     "replay the bundle's golden vectors",
     "Replay the golden vectors and print the digest of all logits; ends with 0 only if every bit agrees.",
     "-m model.mxb --precision base"},
    {"bench", run_bench, true, false, {model_options, engine_options, cache_options, bench_options},
     "measure speed and this machine's read bandwidth",
     "Measure prefill, decode, steps of several rows and of 48 sequences, and the read bandwidth.",
     "-m model.mxb --prompt-tokens 512 -n 128"},
    {"info", run_info, false, false, {model_options, info_options},
     "describe this machine and a bundle",
     "Describe this machine and, with -m, a bundle and its memory plan.",
     "-m model.mxb --cpu"},
};
/* clang-format on */

enum { COMMANDS = sizeof commands / sizeof *commands };

static const command *find_command(const char *name) {
    for (size_t i = 0; i < COMMANDS; i++)
        if (!strcmp(commands[i].name, name)) return &commands[i];
    return NULL;
}

/* Find the option with exactly this name. */
static const option *find_option(const command *c, const char *name, size_t length) {
    for (size_t g = 0; g < MAX_GROUPS && c->groups[g]; g++)
        for (const option *o = c->groups[g]; o->kind != END; o++)
            if (strlen(o->name) == length && !memcmp(o->name, name, length)) return o;
    return NULL;
}

/* Write all words, separated, to out[capacity]. */
static void list_words(word_function *word, const char *separator, char *out, size_t capacity) {
    size_t used = 0;
    for (uint32_t i = 0; word(i) && used < capacity; i++)
        used += (size_t)snprintf(out + used, capacity - used, "%s%s", i > 0 ? separator : "", word(i));
}

static int print_help(void) {
    text_buffer t = {0};
    append_text(&t, "Usage: mxdraft COMMAND [OPTIONS]\n\n  Exact, fast text generation with small language models.\n\n"
                    "Commands (mxdraft COMMAND --help):\n");
    for (size_t i = 0; i < COMMANDS; i++) append_text(&t, "  %-10s%s\n", commands[i].name, commands[i].summary);
    append_text(&t, "\nExit codes: 0 done, 2 usage, 3 file missing or refused, 4 does not fit memory or context,\n"
                    "5 numeric fault, 6 input/output, 130 interrupted, 141 output closed.\n");
    return emit_buffer(&t);
}

static int print_command_help(const command *c) {
    text_buffer t = {0};
    append_text(&t, "Usage: mxdraft %s [OPTIONS]%s\n\n  %s\n\nOptions:\n", c->name, c->takes_text ? " [-]" : "",
                c->help);
    for (size_t g = 0; g < MAX_GROUPS && c->groups[g]; g++)
        for (const option *o = c->groups[g]; o->kind != END; o++) {
            char words[64] = "", left[96];
            if (o->word) list_words(o->word, "|", words, sizeof words);
            snprintf(left, sizeof left, "%s %s", o->name, o->metavar ? o->metavar : words);
            append_text(&t, "  %-27s %s", left, o->help);
            if (o->initial) append_text(&t, "  [default: %s]", o->initial);
            append_text(&t, "\n");
        }
    append_text(&t, "\n  Example: mxdraft %s %s\n", c->name, c->example);
    return emit_buffer(&t);
}

static int print_version(void) {
    text_buffer t = {0};
    append_text(&t, "mxdraft %s\n", mxd_version());
    return emit_buffer(&t);
}

static bool parse_whole(const char *text, uint64_t low, uint64_t high, uint64_t *out) {
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || digits > 20 || text[digits] != '\0') return false;
    errno = 0;
    *out = strtoull(text, NULL, 10);
    return errno == 0 && *out >= low && *out <= high;
}

/* Parse a decimal number, digits[.digits][e[+-]digits]: strtod alone would take signs, nan and hexadecimal. */
static bool parse_real(const char *text, double min, double max, double *out) {
    static const char digits[] = "0123456789";
    const char *p = text;
    size_t n = strspn(p, digits);
    if (n == 0) return false;
    p += n;
    if (*p == '.') {
        if ((n = strspn(++p, digits)) == 0) return false;
        p += n;
    }
    if (*p == 'e') {
        p++;
        if (*p == '+' || *p == '-') p++;
        if ((n = strspn(p, digits)) == 0) return false;
        p += n;
    }
    if (*p != '\0') return false;
    *out = strtod(text, NULL);
    return *out >= min && *out <= max;
}

static bool parse_word(const char *text, word_function *word, uint32_t *out) {
    for (*out = 0; word(*out); ++*out)
        if (!strcmp(text, word(*out))) return true;
    return false;
}

static int usage(const command *c, const option *o, const char *value, const char *expected) {
    return fail(EXIT_USAGE, "%s '%s': expected %s (see mxdraft %s --help)", o->name, value, expected, c->name);
}

/* Store a value (NULL for a flag) in the settings. */
static int set_option(const command *c, const option *o, const char *value, settings *out) {
    void *field = (char *)out + o->offset;
    char expected[128], words[64];
    if (o->given > 0) *(bool *)((char *)out + o->given) = true;
    switch (o->kind) {
    case FLAG: *(bool *)field = true; return EXIT_DONE;
    case TEXT: *(const char **)field = value; return EXIT_DONE;
    case TEXTS:
        if (out->stop_count == MAX_STOPS) return fail(EXIT_USAGE, "more than %d options %s", MAX_STOPS, o->name);
        out->stops[out->stop_count++] = value;
        return EXIT_DONE;
    case WHOLE:
        if (parse_whole(value, o->low, o->high, field)) return EXIT_DONE;
        snprintf(expected, sizeof expected, "a whole number from %llu to %llu", (unsigned long long)o->low,
                 (unsigned long long)o->high);
        return usage(c, o, value, expected);
    case REAL:
        if (parse_real(value, o->min, o->max, field)) return EXIT_DONE;
        snprintf(expected, sizeof expected, "a number from %g to %g", o->min, o->max);
        return usage(c, o, value, expected);
    case WORD:
        if (parse_word(value, o->word, field)) return EXIT_DONE;
        list_words(o->word, ", ", words, sizeof words);
        snprintf(expected, sizeof expected, "one of %s", words);
        return usage(c, o, value, expected);
    case END: break;
    }
    return EXIT_DONE;
}

static int set_defaults(const command *c, settings *out) {
    out->core_fraction = -1; /* the bundle's */
    for (size_t g = 0; g < MAX_GROUPS && c->groups[g]; g++)
        for (const option *o = c->groups[g]; o->kind != END; o++)
            if (o->initial) {
                int code = set_option(c, o, o->initial, out);
                if (code) return code;
            }
    return EXIT_DONE;
}

/* Parse the option at argv[*i] (`--name value`, `--name=value`, `-nvalue`, `-n value`) and move *i past it. */
static int parse_option(const command *c, int argc, char **argv, int *i, settings *out) {
    const char *argument = argv[(*i)++];
    bool is_long = argument[1] == '-';
    size_t name_length = is_long ? strcspn(argument, "=") : 2;
    const option *o = find_option(c, argument, name_length);
    if (!o)
        return fail(EXIT_USAGE, "unknown option '%.*s' (see mxdraft %s --help)", (int)name_length, argument, c->name);
    const char *attached = argument[name_length] != '\0' ? argument + name_length + is_long : NULL;
    if (o->kind == FLAG) {
        if (attached) return fail(EXIT_USAGE, "option '%s' does not take a value", o->name);
        return set_option(c, o, NULL, out);
    }
    if (attached) return set_option(c, o, attached, out);
    if (*i == argc) return fail(EXIT_USAGE, "option '%s' requires an argument", o->name);
    return set_option(c, o, argv[(*i)++], out);
}

static bool is_help(const char *argument) {
    return !strcmp(argument, "--help") || !strcmp(argument, "-h");
}

/* Return whether the command is to run; if not, the process ends with *code. */
static bool parse_command(const command *c, int argc, char **argv, settings *out, int *code) {
    *code = set_defaults(c, out);
    bool only_arguments = false; /* after "--" */
    for (int i = 0; i < argc && !*code;) {
        const char *argument = argv[i];
        if (only_arguments || argument[0] != '-' || argument[1] == '\0') {
            if (c->takes_text && !out->from_stdin && !strcmp(argument, "-")) out->from_stdin = true;
            else *code = fail(EXIT_USAGE, "unexpected argument '%s'", argument);
            i++;
        } else if (!strcmp(argument, "--")) {
            only_arguments = true;
            i++;
        } else if (is_help(argument)) {
            *code = print_command_help(c);
            return false;
        } else {
            *code = parse_option(c, argc, argv, &i, out);
        }
    }
    if (!*code && c->needs_bundle && !out->bundle)
        *code = fail(EXIT_USAGE, "-m is required (see mxdraft %s --help)", c->name);
    return !*code;
}

command_function *parse_arguments(int argc, char **argv, settings *out, int *code) {
    *out = (settings){0};
    *code = EXIT_DONE;
    const char *first = argc > 1 ? argv[1] : "";
    if (argc < 2) {
        *code = fail(EXIT_USAGE, "no command (see mxdraft --help)");
    } else if (is_help(first)) {
        *code = print_help();
    } else if (!strcmp(first, "--version")) {
        *code = print_version();
    } else if (first[0] == '-') {
        *code = fail(EXIT_USAGE, "unknown option '%s' (see mxdraft --help)", first);
    } else {
        const command *c = find_command(first);
        if (!c) *code = fail(EXIT_USAGE, "unknown command '%s' (see mxdraft --help)", first);
        else if (parse_command(c, argc - 2, argv + 2, out, code)) return c->run;
    }
    return NULL;
}
