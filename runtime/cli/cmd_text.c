/* SPDX-License-Identifier: Apache-2.0 */
/* generate, chat and tokenize. */
#include "cli.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct token_ids {
    uint32_t *data; /* allocated */
    size_t n;
} token_ids;

/* ---- encoding ---- */

static int encode_plain(const mxd_model *model, const char *text, size_t length, token_ids *out) {
    mxd_error error;
    size_t n = 0;
    mxd_status status = mxd_encode(model, text, length, NULL, 0, &n, &error);
    if (status && status != MXD_ERR_BUFFER) return fail_status(&error);
    out->data = allocate((n + 1) * sizeof *out->data); /* room for a BOS instead of nothing */
    return mxd_encode(model, text, length, out->data, n, &out->n, &error) ? fail_status(&error) : EXIT_DONE;
}

static int encode_chat(const mxd_model *model, const mxd_message *messages, size_t count, token_ids *out) {
    mxd_error error;
    size_t n = 0;
    mxd_status status = mxd_chat_encode(model, messages, count, 1, NULL, 0, &n, &error);
    if (status && status != MXD_ERR_BUFFER) return fail_status(&error);
    out->data = allocate(n * sizeof *out->data);
    return mxd_chat_encode(model, messages, count, 1, out->data, n, &out->n, &error) ? fail_status(&error) : EXIT_DONE;
}

/* Refuse a text that cannot be a C string, as messages are. */
static int refuse_nul(const char *text, size_t length) {
    const char *nul = memchr(text, '\0', length);
    if (!nul) return EXIT_DONE;
    return fail(EXIT_USAGE, "the text holds a NUL byte at offset %zu: it cannot be in a message or stop string",
                (size_t)(nul - text));
}

/* Encode one user message, after the system message if there is one. */
static int encode_message(const mxd_model *model, const char *system, const char *text, size_t length, token_ids *out) {
    mxd_message messages[2] = {{"system", system}, {"user", text}};
    int code = refuse_nul(text, length);
    if (code) return code;
    return system ? encode_chat(model, messages, 2, out) : encode_chat(model, messages + 1, 1, out);
}

/* Encode a text with nothing added; an empty one as the BOS token. */
static int encode_continuation(const mxd_model *model, const char *text, size_t length, token_ids *out) {
    int code = encode_plain(model, text, length, out);
    if (code || out->n > 0) return code;
    mxd_model_info info;
    mxd_model_get_info(model, &info);
    if (info.bos == UINT32_MAX)
        return fail(EXIT_USAGE, "the prompt is empty, and this model has no BOS token to start from: give some text");
    out->n = 1;
    out->data[0] = info.bos;
    return EXIT_DONE;
}

/* ---- generating ---- */

/* What --explain puts around text that was drafted and accepted. */
typedef struct marks {
    const char *before, *after;
} marks;

/* Return the marks for green, or brackets for who asked for no colours ($NO_COLOR) and terminals without ($TERM). */
static marks drafted_marks(void) {
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
    bool plain = (no_color && *no_color) || (term && !strcmp(term, "dumb"));
    return plain ? (marks){"[", "]"} : (marks){"\033[32m", "\033[0m"};
}

/* Write the step's text, with drafted and accepted parts marked. `origin` has one byte for each byte of text that the
 * sequence holds back: 'd' if it was drafted, else 'o'. */
static int emit_explained(session *run, text_buffer *origin, const char *text, size_t length) {
    size_t n;
    const uint32_t *ids = mxd_seq_output(run->seq, &n);
    const uint8_t *drafted = mxd_seq_drafted(run->seq);
    for (size_t i = 0; i < n; i++) {
        if (mxd_token_is_special(run->model, ids[i])) continue;
        size_t size;
        mxd_token_bytes(run->model, ids[i], &size);
        for (size_t k = 0; k < size; k++) append(origin, drafted[i] ? "d" : "o", 1);
    }
    if (length == 0) return EXIT_DONE;
    const marks m = drafted_marks();
    text_buffer marked = {0};
    for (size_t from = 0, to; from < length; from = to) {
        for (to = from + 1; to < length && origin->data[to] == origin->data[from];) to++;
        bool drafted_part = origin->data[from] == 'd';
        if (drafted_part) append(&marked, m.before, strlen(m.before));
        append(&marked, text + from, to - from);
        if (drafted_part) append(&marked, m.after, strlen(m.after));
    }
    origin->length -= length;
    memmove(origin->data, origin->data + length, origin->length + 1);
    return emit_buffer(&marked);
}

/* Step until the sequence stops or Ctrl-C, and write text as it is made; `reply` (may be NULL) gets all of it. */
static int stream(session *run, bool explain, text_buffer *reply) {
    text_buffer origin = {0};
    mxd_error error;
    int code = EXIT_DONE;
    interrupt_deferred(true);
    while (!code && mxd_seq_stop(run->seq) == MXD_STOP_NONE && !interrupted()) {
        if (mxd_step(run->engine, &run->seq, 1, &error)) {
            free(origin.data);
            return fail_status(&error);
        }
        size_t length;
        const char *text = mxd_seq_text(run->seq, &length);
        code = explain ? emit_explained(run, &origin, text, length) : emit(text, length);
        if (reply) append(reply, text, length);
    }
    interrupt_deferred(false);
    free(origin.data);
    return code;
}

static void print_stats_json(const mxd_seq *seq) {
    size_t size = mxd_seq_stats_json(seq, NULL, 0) + 1;
    char *json = allocate(size);
    mxd_seq_stats_json(seq, json, size);
    json[size - 1] = '\n';
    tell(json, size);
    free(json);
}

static void print_stats_text(const session *run) {
    mxd_stats t;
    mxd_seq_get_stats(run->seq, &t);
    text_buffer text = {0};
    append_text(&text,
                "prompt: %llu tokens, %.1f tok/s; first token after %.3f s\n"
                "generated: %llu tokens, %.1f tok/s; %llu steps; stop: %s\n"
                "drafted: %llu, accepted: %llu, %.2f tokens a step; gain %.2f (expected %.2f)\n"
                "memory: peak %.1f MiB; threads %u; seed %llu\n",
                (unsigned long long)t.prompt_tokens, t.prefill_tok_per_s, t.first_token_s,
                (unsigned long long)t.generated_tokens, t.decode_tok_per_s, (unsigned long long)t.steps,
                mxd_stop_name(mxd_seq_stop(run->seq)), (unsigned long long)t.drafted, (unsigned long long)t.accepted,
                t.tokens_per_step, t.gain, t.expected_gain, (double)t.peak_rss_bytes / (1 << 20),
                (unsigned)mxd_engine_plan(run->engine)->threads, (unsigned long long)run->seed);
    tell(text.data, text.length);
    free(text.data);
}

static void print_stats(const settings *s, const session *run) {
    if (s->stats == STATS_JSON) print_stats_json(run->seq);
    if (s->stats == STATS_TEXT) print_stats_text(run);
}

/* Do what lies between the engine and the first token. */
static int ready(const settings *s, session *run) {
    int code = s->draft != MXD_DRAFT_OFF ? know_costs(run) : EXIT_DONE;
    return code ? code : open_seq(s, run);
}

static void print_tokens(const char *name, const uint32_t *ids, size_t n) {
    text_buffer line = {0};
    append_text(&line, "%s:", name);
    for (size_t i = 0; i < n; i++) append_text(&line, " %u", (unsigned)ids[i]);
    append(&line, "\n", 1);
    tell(line.data, line.length);
    free(line.data);
}

static int generate(const settings *s, session *run, const char *prompt, size_t length, token_ids *ids) {
    mxd_error error;
    int code = open_model(s->bundle, run);
    if (code) return code;
    code = s->raw ? encode_continuation(run->model, prompt, length, ids)
                  : encode_message(run->model, s->system, prompt, length, ids);
    if (code || (code = open_engine(s, 0, run)) || (code = ready(s, run))) return code;
    if (s->dump_tokens) print_tokens("prompt_tokens", ids->data, ids->n);
    if (mxd_seq_prompt(run->seq, ids->data, ids->n, &error)) return fail_status(&error);
    if ((code = stream(run, s->explain, NULL))) return code;
    if (isatty(STDOUT_FILENO) && (code = emit("\n", 1))) return code;
    if (s->dump_tokens) {
        size_t n;
        const uint32_t *tokens = mxd_seq_tokens(run->seq, &n);
        print_tokens("generated_tokens", tokens + ids->n, n - ids->n);
    }
    print_stats(s, run);
    return interrupted() ? EXIT_INTERRUPTED : EXIT_DONE;
}

int run_generate(const settings *s, session *run) {
    if (s->raw && s->system) return fail(EXIT_USAGE, "--system needs the chat template: leave out --raw");
    text_buffer prompt = {0};
    token_ids ids = {0};
    int code = read_text(s, &prompt);
    if (!code) code = generate(s, run, prompt.data, prompt.length, &ids);
    free(ids.data);
    free(prompt.data);
    return code;
}

/* ---- chat ---- */

typedef struct conversation {
    mxd_message *messages; /* allocated, and so is each content */
    size_t count;
} conversation;

static void add_message(conversation *c, const char *role, const char *content) {
    c->messages = reallocate(c->messages, (c->count + 1) * sizeof *c->messages);
    c->messages[c->count++] = (mxd_message){role, format_text("%s", content)};
}

static void drop_messages(conversation *c, size_t keep) {
    while (c->count > keep) free((void *)c->messages[--c->count].content);
}

static void start_conversation(conversation *c, const char *system) {
    drop_messages(c, 0);
    if (system) add_message(c, "system", system);
}

/* Queue the conversation. Keep what it shares with the tokens already processed, but run the last token again. */
static mxd_status queue_conversation(session *run, const token_ids *ids, mxd_error *error) {
    size_t held_count, shared = 0;
    const uint32_t *held = mxd_seq_tokens(run->seq, &held_count);
    while (shared < held_count && shared + 1 < ids->n && held[shared] == ids->data[shared]) shared++;
    mxd_status status = mxd_seq_truncate(run->seq, shared, error);
    if (status) return status;
    return mxd_seq_prompt(run->seq, ids->data + shared, ids->n - shared, error);
}

/* Answer one line and add both to the conversation. If it does not fit, drop it, set *dropped and return EXIT_CAPACITY. */
static int turn(const settings *s, session *run, conversation *c, const char *line, bool *dropped) {
    mxd_error error;
    token_ids ids = {0};
    add_message(c, "user", line);
    int code = encode_chat(run->model, c->messages, c->count, &ids);
    mxd_status status = code ? MXD_OK : queue_conversation(run, &ids, &error);
    free(ids.data);
    if (status == MXD_ERR_CONTEXT) {
        drop_messages(c, c->count - 1);
        *dropped = true;
        return fail(EXIT_CAPACITY, "%s; /reset starts a new conversation", error.message);
    }
    if (status) return fail_status(&error);
    text_buffer reply = {0};
    if (!code) code = stream(run, false, &reply);
    if (!code) code = emit("\n", 1);
    if (!code) {
        add_message(c, "assistant", reply.data ? reply.data : "");
        print_stats(s, run);
        if (interrupted()) code = EXIT_INTERRUPTED;
    }
    free(reply.data);
    return code;
}

static int converse(const settings *s, session *run, conversation *c, line_reader *input) {
    int code = EXIT_DONE; /* of the last message */
    start_conversation(c, s->system);
    for (;;) {
        char *line;
        size_t length;
        if (isatty(STDIN_FILENO)) tell("> ", 2);
        int read = read_line(input, &line, &length);
        if (!line) return read ? read : code;
        if (read) {
            code = read;
            continue;
        }
        int refused = refuse_nul(line, length);
        if (refused) return refused;
        if (!strcmp(line, "/quit")) return code;
        if (!strcmp(line, "/reset")) {
            start_conversation(c, s->system);
            code = EXIT_DONE;
        } else if (length > 0) {
            bool dropped = false;
            code = turn(s, run, c, line, &dropped);
            if (code && !dropped) return code;
        }
    }
}

int run_chat(const settings *s, session *run) {
    conversation c = {0};
    line_reader input = {0};
    int code;
    if (!(code = open_model(s->bundle, run)) && !(code = open_engine(s, 0, run)) && !(code = ready(s, run)))
        code = converse(s, run, &c, &input);
    free(input.text.data);
    drop_messages(&c, 0);
    free(c.messages);
    return code;
}

/* ---- tokenize ---- */

static int emit_ids(const token_ids *ids) {
    text_buffer line = {0};
    for (size_t i = 0; i < ids->n; i++) append_text(&line, i > 0 ? " %u" : "%u", (unsigned)ids->data[i]);
    append(&line, "\n", 1);
    return emit_buffer(&line);
}

static bool is_white(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/* Append the bytes of the ids in text[length]. By hand: strspn() and its like may look at all of the text each time. */
static int decode_ids(const mxd_model *model, const char *text, size_t length, text_buffer *out) {
    mxd_model_info info;
    mxd_model_get_info(model, &info);
    for (size_t i = 0; i < length;) {
        size_t begin = i, digits = 0, size;
        uint64_t id = 0;
        for (; i < length && !is_white(text[i]); i++)
            if (text[i] >= '0' && text[i] <= '9' && digits < 11) {
                id = 10 * id + (uint64_t)(text[i] - '0');
                digits++;
            }
        if (i == begin) {
            i++;
            continue;
        }
        if (digits != i - begin || digits > 10)
            return fail(EXIT_USAGE, "'%.*s' is not a token id", (int)(i - begin < 64 ? i - begin : 64), text + begin);
        const char *bytes = id < info.vocab ? mxd_token_bytes(model, (uint32_t)id, &size) : NULL;
        if (!bytes)
            return fail(EXIT_USAGE, "token %llu is not in the vocabulary of %u", (unsigned long long)id,
                        (unsigned)info.vocab);
        append(out, bytes, size);
    }
    return EXIT_DONE;
}

static int tokenize(const settings *s, session *run, const char *text, size_t length) {
    int code = open_model(s->bundle, run);
    if (code) return code;
    if (s->decode) {
        text_buffer decoded = {0};
        code = decode_ids(run->model, text, length, &decoded);
        if (!code) return emit_buffer(&decoded);
        free(decoded.data);
        return code;
    }
    token_ids ids = {0};
    code = s->chat ? encode_message(run->model, NULL, text, length, &ids)
                   : encode_plain(run->model, text, length, &ids);
    if (!code) code = emit_ids(&ids);
    free(ids.data);
    return code;
}

int run_tokenize(const settings *s, session *run) {
    if (s->chat && s->decode) return fail(EXIT_USAGE, "--chat and --decode exclude each other");
    text_buffer text = {0};
    int code = read_text(s, &text);
    if (!code) code = tokenize(s, run, text.data, text.length);
    free(text.data);
    return code;
}
