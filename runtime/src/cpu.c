/* SPDX-License-Identifier: Apache-2.0 */
#include "cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

#define X86 HERE

/* Return the register state that the system saves (XCR0), 0 if it does not say. */
static unsigned saved_state(void) {
    unsigned a, b, c, d, xcr0, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return 0; /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return xcr0;
}

static bool has_avx2(void) {
    unsigned a, b, c, d;
    const unsigned need = 1u << 12 | 1u << 28 | 1u << 29; /* FMA, AVX, F16C */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need) != need || (saved_state() & 0x6) != 0x6) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 5);
}

static bool has_avx512(void) {
    unsigned a, b, c, d;
    const unsigned need = 1u << 16 | 1u << 30 | 1u << 31; /* F, BW, VL */
    if ((saved_state() & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (b & need) == need && (c & 1u << 11); /* VNNI */
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

#define ARM HERE

static bool has_neon(void) {
    return true; /* part of armv8.0-a */
}

static bool has_dotprod(void) {
    return getauxval(AT_HWCAP) & 1u << 20; /* HWCAP_ASIMDDP */
}

static bool has_i8mm(void) {
    return has_dotprod() && getauxval(AT_HWCAP2) & 1u << 13; /* HWCAP2_I8MM */
}
#endif

#define HERE(level) {#level, has_##level, mxd_kernels_init_##level}
#define ELSEWHERE(level) {#level, NULL, NULL}
#ifndef X86
#define X86 ELSEWHERE
#endif
#ifndef ARM
#define ARM ELSEWHERE
#endif

/* Oldest first: each level overwrites what it does better. */
static const mxd_cpu_level LEVELS[] = {X86(avx2), X86(avx512), ARM(neon), ARM(dotprod), ARM(i8mm)};
enum { LEVEL_COUNT = sizeof LEVELS / sizeof *LEVELS };

const mxd_cpu_level *mxd_cpu_levels(size_t *count) {
    *count = LEVEL_COUNT;
    return LEVELS;
}

static mxd_status refuse_level(const char *name, int len, mxd_error *err) {
    char known[128];
    size_t at = 0;
    for (int i = 0; i < LEVEL_COUNT; i++)
        at += (size_t)snprintf(known + at, sizeof known - at, "%s%s", i ? ", " : "", LEVELS[i].name);
    return mxd_fail(err, MXD_ERR_ARGUMENT, "MXDRAFT_CPU_MASK: unknown level '%.*s' (known: %s)", len, name, known);
}

static mxd_status parse_mask(bool masked[LEVEL_COUNT], mxd_error *err) {
    const char *p = getenv("MXDRAFT_CPU_MASK");
    while (p && *p) {
        size_t len = strcspn(p, ",");
        bool known = len == 0;
        for (int i = 0; i < LEVEL_COUNT; i++)
            if (len == strlen(LEVELS[i].name) && !memcmp(p, LEVELS[i].name, len)) known = masked[i] = true;
        if (!known) return refuse_level(p, (int)len, err);
        p += len + (p[len] == ',');
    }
    return MXD_OK;
}

mxd_status mxd_cpu_bind(mxd_kernels *kernels, mxd_kernel_names *names, mxd_error *err) {
    bool masked[LEVEL_COUNT] = {false};
    mxd_status status = parse_mask(masked, err);
    if (status) return status;
    mxd_kernels_init_ref(kernels, names);
    for (int i = 0; i < LEVEL_COUNT; i++)
        if (!masked[i] && LEVELS[i].present && LEVELS[i].present()) LEVELS[i].init(kernels, names);
    return MXD_OK;
}

size_t mxd_cpu_describe(char *buf, size_t cap) {
    mxd_kernels kernels;
    mxd_kernel_names names;
    mxd_error err;
    if (mxd_cpu_bind(&kernels, &names, &err)) return (size_t)snprintf(buf, cap, "error %s\n", err.message);
#define LINE(type, op) {#op, names.op},
    const struct {
        const char *op, *function;
    } lines[] = {MXD_KERNELS(LINE)};
#undef LINE
    size_t len = 0;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        size_t room = len < cap ? cap - len : 0;
        len += (size_t)snprintf(room ? buf + len : NULL, room, "%s %s\n", lines[i].op, lines[i].function);
    }
    return len;
}
