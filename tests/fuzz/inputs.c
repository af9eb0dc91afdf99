/* SPDX-License-Identifier: Apache-2.0 */
/* Fuzz of everything that the library reads: mutated bundles whose checksums are mended, arbitrary text through the
 * tokenizer both ways, chats, costs files. Nothing may crash or be read out of bounds (build with AddressSanitizer);
 * what is refused has a status and a message, and what is accepted works.
 *
 *   inputs TARGET SECONDS [--seed S] [--runs N] BUNDLE...        TARGET: bundle, text, chat, costs
 *
 * Run number i depends on S + i alone: a failure prints the --seed that repeats it, with --runs 1. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "mxdraft.h"

enum { HEADER = 64, ENTRY = 64, LARGE = 1 << 16, TEXT = 4096, TOKENS = 16384 };

static uint64_t seed, rng_state;
static uint64_t accepted, refused;

static uint64_t next_random(void) { /* SplitMix64 */
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static size_t below(size_t n) {
    return (size_t)(next_random() % n);
}

static bool one_in(size_t n) {
    return below(n) == 0;
}

__attribute__((noreturn)) static void fail(const char *what) {
    fprintf(stderr, "FAILED --seed %llu: %s\n", (unsigned long long)seed, what);
    abort();
}

/* Check that a refusal says why. */
static void expect_refusal(mxd_status status, const mxd_error *err) {
    if (err->status != (int32_t)status || !err->message[0]) fail("a refusal without a message");
    refused++;
}

/* ---- bundles ---- */

typedef struct file {
    uint8_t *data;
    size_t size;
    const char *path;
} file;

static uint32_t crc32(const uint8_t *p, size_t n) {
    static uint32_t table[256];
    uint32_t c = UINT32_MAX;
    if (!table[255])
        for (uint32_t i = 0; i < 256; i++) {
            table[i] = i;
            for (int k = 0; k < 8; k++) table[i] = table[i] & 1 ? table[i] >> 1 ^ 0xedb88320u : table[i] >> 1;
        }
    while (n--) c = c >> 8 ^ table[(c ^ *p++) & 255];
    return ~c;
}

static uint64_t load(const uint8_t *p, size_t n) {
    uint64_t value = 0;
    while (n--) value = value << 8 | p[n];
    return value;
}

static void store32(uint8_t *p, uint32_t value) {
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(value >> 8 * i);
}

/* Change some bytes of p[n]: flip, set to an extreme, copy from elsewhere, a 32-bit number to something near. */
static void mutate(uint8_t *p, size_t n) {
    static const uint8_t extremes[] = {0, 1, 0x7f, 0x80, 0xfe, 0xff};
    for (size_t k = 1 + below(4); k > 0; k--) {
        size_t at = below(n);
        switch (below(5)) {
        case 0: p[at] ^= (uint8_t)(1u << below(8)); break;
        case 1: p[at] = extremes[below(sizeof extremes)]; break;
        case 2: p[at] = p[below(n)]; break;
        case 3: p[at] = (uint8_t)next_random(); break;
        default:
            if (n >= 4) {
                at = below(n / 4) * 4;
                store32(p + at, (uint32_t)load(p + at, 4) + (uint32_t)below(5) - 2);
            }
        }
    }
}

static mxd_model *open_bytes(const uint8_t *data, size_t n, mxd_status *status, mxd_error *err) {
    char path[64];
    mxd_model *m = NULL;
    int fd = memfd_create("bundle", 0);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n) fail("no memory for a file");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    *status = mxd_model_open(path, &m, err);
    close(fd);
    return m;
}

/* Use a bundle that was accepted: whatever its numbers are, it must not crash. */
static void use_model(const mxd_model *m) {
    mxd_error err;
    mxd_options o;
    mxd_engine *g;
    mxd_seq *s;
    mxd_sampling p;
    uint32_t ids[8] = {0};
    mxd_model_info info;
    mxd_model_get_info(m, &info);
    for (size_t i = 0; i < 8; i++) ids[i] = (uint32_t)below(info.vocab);
    mxd_options_default(&o);
    o.ctx = info.max_positions < 24 ? info.max_positions : 24;
    o.threads = 1;
    o.kv = (uint32_t)below(5);
    if (mxd_engine_open(m, &o, &g, &err)) return;
    mxd_sampling_default(&p);
    if (!mxd_seq_open(g, &p, &s, &err)) {
        if (!mxd_seq_prompt(s, ids, o.ctx > 9 ? 8 : 1, &err))
            while (!mxd_seq_stop(s) && !mxd_step(g, &s, 1, &err)) {
            }
        mxd_seq_close(&s);
    }
    mxd_engine_close(&g);
    accepted++;
}

static void fuzz_bundle(const file *f) {
    mxd_error err = {0};
    mxd_status status;
    size_t n = f->size, count = (size_t)load(f->data + 12, 4);
    uint8_t *data = malloc(n + 1), *table = data + HEADER;
    memcpy(data, f->data, n);
    for (size_t k = 1 + below(2); k > 0; k--) {
        uint8_t *entry = table + below(count) * ENTRY;
        size_t offset = (size_t)load(entry + 32, 8), size = (size_t)load(entry + 40, 8);
        if (one_in(8)) mutate(data, HEADER + count * ENTRY); /* header and table */
        else if (offset <= n && size <= n - offset && size > 0) mutate(data + offset, size < LARGE ? size : LARGE);
    }
    for (size_t i = 0; i < count && !one_in(50); i++) { /* mostly, as a hostile writer would */
        uint8_t *entry = table + i * ENTRY;
        size_t offset = (size_t)load(entry + 32, 8), size = (size_t)load(entry + 40, 8);
        if (offset <= n && size <= n - offset) store32(entry + 48, crc32(data + offset, size));
    }
    if (!one_in(20)) store32(data + 24, crc32(table, count * ENTRY));
    if (one_in(30)) n = below(n);
    mxd_model *m = open_bytes(data, n, &status, &err);
    free(data);
    if (status) {
        expect_refusal(status, &err);
        return;
    }
    use_model(m);
    mxd_model_close(&m);
}

/* ---- text ---- */

/* Fill text with bytes of many kinds: words, white space, control-token text, broken and whole UTF-8. */
static size_t make_text(char *text, size_t cap) {
    static const char *const pieces[] = {"the",
                                         " house",
                                         "\n",
                                         "   ",
                                         "<|im_start|>",
                                         "<|im_end|>",
                                         "1234",
                                         "'s",
                                         "\xc3\xa9",
                                         "\xe2\x82\xac",
                                         "\xf0\x9f\x98\x80",
                                         "\xe2\x82",
                                         "\xff",
                                         "\xc0\x80",
                                         "a",
                                         "aaaaaaaa",
                                         "\t",
                                         "!?",
                                         "\xed\xa0\x80",
                                         "\xcc\x81"};
    size_t n = 0, count = one_in(20) ? 400 : below(40);
    for (size_t i = 0; i < count; i++) {
        const char *piece = pieces[below(sizeof pieces / sizeof *pieces)];
        size_t len = strlen(piece);
        if (n + len >= cap) break;
        memcpy(text + n, piece, len);
        n += len;
        if (one_in(10) && n + 1 < cap) text[n++] = (char)next_random();
    }
    text[n] = 0;
    return n;
}

static void fuzz_text(const mxd_model *m) {
    static char text[TEXT], back[TEXT];
    static uint32_t ids[TOKENS];
    mxd_error err = {0};
    size_t count = 0, length = 0, n = make_text(text, sizeof text), cap = one_in(4) ? below(20) : TOKENS;
    mxd_status status = mxd_encode(m, text, n, ids, cap, &count, &err);
    if (status) {
        if (status != MXD_ERR_BUFFER || count <= cap) fail("text is refused");
        expect_refusal(status, &err);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        size_t len;
        const char *bytes = mxd_token_bytes(m, ids[i], &len);
        if (!bytes || mxd_token_is_special(m, ids[i]) || length + len > n) fail("a token that text cannot have");
        memcpy(back + length, bytes, len);
        length += len;
    }
    if (length != n || memcmp(back, text, n)) fail("text is not what it was");
    accepted++;
}

static void fuzz_chat(const mxd_model *m) {
    static const char *const roles[] = {"user", "assistant", "system", "tool", "", "user\n"};
    static char texts[6][TEXT];
    static uint32_t ids[TOKENS];
    mxd_message messages[6];
    mxd_error err = {0};
    size_t n = below(7), count = 0;
    for (size_t i = 0; i < n; i++) {
        make_text(texts[i], sizeof texts[i]);
        messages[i] = (mxd_message){roles[below(one_in(4) ? 6 : 3)], texts[i]};
    }
    mxd_status status = mxd_chat_encode(m, messages, n, (int)below(2), ids, one_in(4) ? below(30) : TOKENS, &count,
                                        &err);
    if (status) expect_refusal(status, &err);
    else accepted++;
}

/* ---- costs ---- */

static void fuzz_costs(mxd_engine *g, const char *directory) {
    static const char *const numbers[] = {"0",   "-1", "1e308", "nan",  "inf",   "0x10",
                                          "1,5", "",   "1",     "1000", "3.5e9", "x"};
    char path[512], command[64];
    mxd_error err;
    static char name[300];
    if (!name[0]) { /* the name depends on machine and engine: let the library write one */
        if (mxd_engine_measure_costs(g, directory, &err)) fail("measuring");
        FILE *list = (snprintf(command, sizeof command, "ls %.40s", directory), popen(command, "r"));
        if (!list || !fgets(name, sizeof name, list)) fail("no costs file");
        name[strcspn(name, "\n")] = 0;
        pclose(list);
    }
    snprintf(path, sizeof path, "%s/%s", directory, name);
    FILE *f = fopen(path, "w");
    size_t count = one_in(4) ? below(40) : 18;
    double value = 1 + (double)below(1000);
    for (size_t i = 0; i < count; i++) {
        if (one_in(12)) fputs(numbers[below(sizeof numbers / sizeof *numbers)], f);
        else fprintf(f, "%.3f", value += (double)below(100));
        fputs(i + 1 < count ? one_in(30) ? "\n" : " " : one_in(10) ? "" : "\n", f);
    }
    fclose(f);
    if (mxd_engine_load_costs(g, directory)) {
        mxd_costs costs;
        mxd_engine_get_costs(g, &costs);
        for (int i = 1; i <= 16; i++)
            if (!(costs.step[i] > 0) || costs.step[i] < costs.step[i - 1]) fail("impossible costs are believed");
        accepted++;
    } else {
        refused++;
    }
}

/* ---- the driver ---- */

static file read_file(const char *path) {
    file f = {.path = path};
    FILE *in = fopen(path, "rb");
    struct stat st;
    if (!in || fstat(fileno(in), &st)) exit(3);
    f.size = (size_t)st.st_size;
    f.data = malloc(f.size);
    if (fread(f.data, 1, f.size, in) != f.size) exit(3);
    fclose(in);
    return f;
}

static void run(const char *target, const file *f, const mxd_model *m, mxd_engine *g, const char *directory) {
    if (!strcmp(target, "bundle")) fuzz_bundle(f);
    else if (!strcmp(target, "text")) fuzz_text(m);
    else if (!strcmp(target, "chat")) fuzz_chat(m);
    else if (!strcmp(target, "costs")) fuzz_costs(g, directory);
    else exit(2);
}

int main(int argc, char **argv) {
    uint64_t first = 1, runs = UINT64_MAX, done = 0;
    int at = 3;
    if (argc < 4) return 2;
    double seconds = atof(argv[2]);
    for (; at + 1 < argc && argv[at][0] == '-'; at += 2) {
        uint64_t value = strtoull(argv[at + 1], NULL, 10);
        if (!strcmp(argv[at], "--seed")) first = value;
        else if (!strcmp(argv[at], "--runs")) runs = value;
        else return 2;
    }
    file files[8];
    mxd_model *models[8];
    mxd_engine *engine;
    mxd_error err;
    mxd_options o;
    size_t count = 0;
    char directory[] = "/tmp/mxdraft-fuzz-XXXXXX";
    for (; at < argc && count < 8; at++, count++) {
        files[count] = read_file(argv[at]);
        if (mxd_model_open(argv[at], &models[count], &err)) return 3;
    }
    mxd_options_default(&o);
    o.ctx = 100;
    o.threads = 1;
    if (!count || !mkdtemp(directory) || mxd_engine_open(models[0], &o, &engine, &err)) return 3;
    time_t start = time(NULL);
    for (; done < runs && difftime(time(NULL), start) < seconds; done++) {
        rng_state = (seed = first + done) * 0xd1342543de82ef95u;
        size_t i = below(count);
        run(argv[1], &files[i], models[i], engine, directory);
    }
    mxd_engine_close(&engine);
    while (count) {
        mxd_model_close(&models[--count]);
        free(files[count].data);
    }
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", directory);
    if (system(command)) return 3;
    printf("%s: %llu runs, %llu accepted, %llu refused\n", argv[1], (unsigned long long)done,
           (unsigned long long)accepted, (unsigned long long)refused);
    return 0;
}
