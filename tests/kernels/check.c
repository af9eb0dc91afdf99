/* SPDX-License-Identifier: Apache-2.0 */
/* Check every kernel of every CPU level against the reference, bit by bit, or time it.
 *
 *   check [-s SEED] [-n ITERATIONS] [-k KERNEL] [-b | -l] [LEVEL ...]
 *
 * Without LEVEL: all levels of this CPU. -b times instead of checking, -l lists what the levels bind. Prints one line
 * per kernel and level; exits with 1 if any failed. Some levels run only when named: "emulated-avx512", which is avx512
 * on any machine, and "broken", "rho_ignored", "rho_off" and "scale_of_base", which must fail in every kernel. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../runtime/src/cpu.h"
#include "harness.h"

static const char *const STYLE_NAMES[STYLES] = {"plain", "wide", "ties", "edge", "nonfinite"};

static uint64_t seed = 1, iterations = 1;
static const char *only_kernel;
static enum { CHECK, BENCH, LIST } mode = CHECK;

static mxd_kernels reference;
static mxd_kernel_names reference_names;

typedef struct level {
    const char *name;
    mxd_kernels kernels; /* the reference, overwritten by this level alone */
    mxd_kernel_names names;
} level;

static bool overrides(const level *l, const op *o) {
    const char *ours = (const char *)&l->kernels + o->pointer_at, *ref = (const char *)&reference + o->pointer_at;
    return memcmp(ours, ref, sizeof(void (*)(void))) != 0;
}

static const char *bound_name(const level *l, const op *o) {
    const char *name;
    memcpy(&name, (const char *)&l->names + o->name_at, sizeof name);
    return name;
}

static void print_sizes(const op *o, const size_t *size) {
    for (int i = 0; i < MAX_SIZES && o->size_names[i]; i++) printf(" %s=%zu", o->size_names[i], size[i]);
}

/* Run a case on both sides, which start from the same random state and so get the same inputs. */
static bool check_case(const level *l, const op *o, const size_t *size, style style, bool at_end, uint64_t random,
                       char *problem, size_t cap) {
    trial ref = {.kernels = &reference, .size = size, .style = style, .at_end = at_end, .random = random};
    trial ours = ref;
    ours.kernels = &l->kernels;
    ours.side = 1;
    return run_trial(o, &ref, problem, cap) && run_trial(o, &ours, problem, cap) &&
           same_buffers(&ref, &ours, problem, cap);
}

static bool check_kernel(const level *l, const op *o) {
    char expected[64], problem[256];
    snprintf(expected, sizeof expected, "mxd_%s_%s", o->name, l->name);
    if (strcmp(bound_name(l, o), expected)) {
        printf("%-8s %-14s FAILED: is named %s, not %s\n", l->name, o->name, bound_name(l, o), expected);
        return false;
    }
    size_t cases = 0, size[MAX_SIZES] = {0};
    for (uint64_t s = seed; s < seed + iterations; s++)
        for (size_t index = 0; o->sizes(index, size); index++)
            for (int style = 0; style < STYLES; style++, cases++) {
                bool at_end = (index + (size_t)style) % 2; /* so that every size meets both guards */
                uint64_t random = ((s * 1009 + (uint64_t)(o - OPS)) * 1000003 + index) * STYLES + (uint64_t)style;
                if (check_case(l, o, size, style, at_end, random, problem, sizeof problem)) continue;
                printf("%-8s %-14s FAILED at", l->name, o->name);
                print_sizes(o, size);
                printf(" input=%s guard=%s seed=%llu: %s\n", STYLE_NAMES[style], at_end ? "after" : "before",
                       (unsigned long long)s, problem);
                return false;
            }
    printf("%-8s %-14s ok %zu cases\n", l->name, o->name, cases);
    return true;
}

static double nanoseconds(const mxd_kernels *kernels, const op *o, const size_t *size) {
    char problem[256];
    trial t = {.kernels = kernels, .size = size, .style = PLAIN, .random = seed, .timed = true};
    if (!run_trial(o, &t, problem, sizeof problem)) {
        fprintf(stderr, "%s: %s\n", o->name, problem);
        exit(1);
    }
    return t.seconds * 1e9;
}

static void bench_kernel(const level *l, const op *o) {
    for (int i = 0; i < MAX_BENCH && o->bench[i][0]; i++) {
        double ours = nanoseconds(&l->kernels, o, o->bench[i]), ref = nanoseconds(&reference, o, o->bench[i]);
        printf("%-8s %-14s %11.1f ns  ref %11.1f ns  %6.1fx ", l->name, o->name, ours, ref, ref / ours);
        print_sizes(o, o->bench[i]);
        printf("\n");
    }
}

/* Return the number of kernels that failed. */
static int run_level(const mxd_cpu_level *known) {
    if (!known->present || !known->present()) {
        printf("%-8s not on this CPU\n", known->name);
        return 0;
    }
    int failures = 0;
    level l = {known->name, reference, reference_names};
    known->init(&l.kernels, &l.names);
    for (const op *o = OPS; o < OPS + OP_COUNT; o++) {
        if (!overrides(&l, o) || (only_kernel && strcmp(only_kernel, o->name))) continue;
        switch (mode) {
        case CHECK: failures += !check_kernel(&l, o); break;
        case BENCH: bench_kernel(&l, o); break;
        case LIST: printf("%-8s %-14s %s\n", l.name, o->name, bound_name(&l, o)); break;
        }
    }
    return failures;
}

static bool always(void) {
    return true;
}

static const mxd_cpu_level *find_level(const char *name) {
    static const mxd_cpu_level EMULATED = {"avx512", always, init_emulated_avx512};
    static const mxd_cpu_level WRONG[] = {{"broken", always, init_broken},
                                          {"rho_ignored", always, init_rho_ignored},
                                          {"rho_off", always, init_rho_off},
                                          {"scale_of_base", always, init_scale_of_base}};
    size_t count;
    const mxd_cpu_level *known = mxd_cpu_levels(&count);
    for (size_t i = 0; i < count; i++)
        if (!strcmp(name, known[i].name)) return &known[i];
    for (size_t i = 0; i < sizeof WRONG / sizeof *WRONG; i++)
        if (!strcmp(name, WRONG[i].name)) return &WRONG[i];
    return strcmp(name, "emulated-avx512") ? NULL : &EMULATED;
}

static bool known_kernel(const char *name) {
    for (size_t i = 0; i < OP_COUNT; i++)
        if (!strcmp(name, OPS[i].name)) return true;
    return false;
}

static _Noreturn void usage(const char *problem, const char *value) {
    fprintf(stderr, "check: %s '%s'\nusage: check [-s SEED] [-n ITERATIONS] [-k KERNEL] [-b | -l] [LEVEL ...]\n",
            problem, value);
    exit(2);
}

static uint64_t number(const char *text) {
    char *end;
    uint64_t value = strtoull(text, &end, 0);
    if (end == text || *end) usage("not a number:", text);
    return value;
}

int main(int argc, char **argv) {
    int option;
    while ((option = getopt(argc, argv, "s:n:k:bl")) != -1) {
        switch (option) {
        case 's': seed = number(optarg); break;
        case 'n': iterations = number(optarg); break;
        case 'k': only_kernel = optarg; break;
        case 'b': mode = BENCH; break;
        case 'l': mode = LIST; break;
        default: usage("cannot read", argv[optind - 1]);
        }
    }
    if (only_kernel && !known_kernel(only_kernel)) usage("unknown kernel", only_kernel);
    for (int i = optind; i < argc; i++)
        if (!find_level(argv[i])) usage("unknown level", argv[i]);

    harness_init();
    mxd_kernels_init_ref(&reference, &reference_names);
    printf("seed %llu\n", (unsigned long long)seed);
    int failures = 0;
    for (int i = optind; i < argc; i++) failures += run_level(find_level(argv[i]));
    if (optind == argc) {
        size_t count;
        const mxd_cpu_level *known = mxd_cpu_levels(&count);
        for (size_t i = 0; i < count; i++) failures += run_level(&known[i]);
    }
    return failures > 0;
}
