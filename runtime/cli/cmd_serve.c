/* SPDX-License-Identifier: Apache-2.0 */
/* serve. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../serve/listen.h"
#include "cli.h"

enum { KEY_BYTES = 512, OTHER_FILES = 32, MEMORY_SHARE = 9 /* tenths of what is available */ };

/* Read the key: the first line of a file. */
static int read_key(const char *path, char **out) {
    char key[KEY_BYTES + 1];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) return fail(errno == ENOENT ? EXIT_REFUSED : EXIT_IO, "cannot read %s: %s", path, strerror(errno));
    ssize_t got = read(fd, key, sizeof key);
    int reason = errno;
    close(fd);
    if (got < 0) return fail(EXIT_IO, "cannot read %s: %s", path, strerror(reason));
    const char *end = memchr(key, '\n', (size_t)got);
    size_t length = end ? (size_t)(end - key) : (size_t)got;
    if (length > 0 && key[length - 1] == '\r') length--;
    if (length == 0 || length > KEY_BYTES)
        return fail(EXIT_REFUSED, "%s: expected a key of 1 to %d bytes", path, KEY_BYTES);
    for (size_t i = 0; i < length; i++)
        if (key[i] <= ' ' || key[i] > '~') return fail(EXIT_REFUSED, "%s: byte %zu cannot be in a key", path, i);
    *out = format_text("%.*s", (int)length, key);
    return EXIT_DONE;
}

/* Name the model like its file, without ".mxb". */
static char *name_of(const char *path) {
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t length = strlen(name);
    if (length > 4 && !strcmp(name + length - 4, ".mxb")) length -= 4;
    return format_text("%.*s", (int)length, name);
}

/* Find how many answers and parked sequences the memory holds: fewer than asked for where it is short, first of those
 * parked. */
static int fit(const settings *s, session *run, uint64_t *parallel, uint64_t *sequences) {
    *parallel = s->parallel;
    *sequences = s->parallel + s->parked;
    for (;;) {
        mxd_plan plan;
        settings tried = *s;
        tried.sequences = *sequences;
        int code = plan_engine(&tried, 0, run, &plan);
        if (code) return code;
        if (plan.total <= plan.available / 10 * MEMORY_SHARE || *sequences == 1) break;
        --*sequences;
        if (*parallel > 1 && *parallel >= *sequences) --*parallel;
    }
    if (*parallel + s->parked > *sequences || *parallel < s->parallel)
        note("memory holds %u sequences: answers to %u at once, %u parked", (unsigned)*sequences, (unsigned)*parallel,
             (unsigned)(*sequences - *parallel));
    return EXIT_DONE;
}

/* Open model, engine and its thread. */
static int open_server(const settings *s, session *run, server *v) {
    uint64_t sequences, parallel;
    struct stat st;
    struct rlimit files;
    int code = open_model(s->bundle, run);
    if (!code) code = fit(s, run, &parallel, &sequences);
    if (code) return code;
    settings fitted = *s;
    fitted.sequences = sequences;
    if ((code = open_engine(&fitted, 0, run))) return code;
    if (s->draft != MXD_DRAFT_OFF && (code = know_costs(run))) return code;
    v->plan = mxd_engine_plan(run->engine);
    mxd_model_get_info(run->model, &v->info);
    v->model_name = s->alias ? format_text("%s", s->alias) : name_of(s->bundle);
    v->model_time = stat(s->bundle, &st) ? 0 : (int64_t)st.st_mtime;
    v->parallel = (uint32_t)parallel;
    v->started = clock_seconds();
    v->most_connections = MOST_CONNECTIONS;
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < MOST_CONNECTIONS + OTHER_FILES)
        v->most_connections = files.rlim_cur > 2 * OTHER_FILES ? (uint32_t)files.rlim_cur - OTHER_FILES : OTHER_FILES;
    if (pipe2(v->wake, O_NONBLOCK | O_CLOEXEC)) return fail(EXIT_IO, "cannot make a pipe: %s", strerror(errno));
    return scheduler_start(run, (uint32_t)sequences, (uint32_t)parallel, v->wake[1], &v->scheduler);
}

int run_serve(const settings *s, session *run) {
    static server v;
    v = (server){.settings = s, .run = run};
    int code = s->api_key_file ? read_key(s->api_key_file, &v.api_key) : EXIT_DONE;
    if (!code) code = open_listeners(&v); /* before the model: whoever connects early waits and is answered */
    if (!code) code = open_server(s, run, &v);
    if (code) return code;
    announce_listeners(&v);
    return server_run(&v);
}
