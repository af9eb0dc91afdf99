/* SPDX-License-Identifier: Apache-2.0 */
#include "harness.h"

#undef NDEBUG /* which some compilers define with -O3 */
#include <assert.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* A region is [guard][room][guard], multiples of any page size. Guards are wide, so that a wrong stride hits them. */
enum { ROOM = 1 << 20, GUARD = 1 << 20 };

static uint8_t *regions[2][MAX_BUFFERS]; /* by side: where the room starts */
static sigjmp_buf recovery;
static void *volatile fault_address;

static void on_signal(int sig, siginfo_t *info, void *context) {
    (void)context;
    fault_address = info->si_addr;
    siglongjmp(recovery, sig);
}

void harness_init(void) {
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < MAX_BUFFERS; i++) {
            uint8_t *p = mmap(NULL, GUARD + ROOM + GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p == MAP_FAILED || mprotect(p + GUARD, ROOM, PROT_READ | PROT_WRITE)) {
                perror("mmap");
                exit(2);
            }
            regions[side][i] = p + GUARD;
        }
    struct sigaction action = {.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    sigaction(SIGILL, &action, NULL);
}

/* ---- buffers ---- */

static size_t element_size(element type) {
    return type == F32 ? 4 : type == F16 || type == I16 ? 2 : 1;
}

void *take(trial *t, const char *name, element type, size_t count) {
    size_t bytes = count * element_size(type);
    assert(t->buffer_count < MAX_BUFFERS && bytes <= ROOM);
    uint8_t *room = regions[t->side][t->buffer_count];
    void *data = t->at_end ? room + ROOM - bytes : room;
    /* All bits set is NaN, which no arithmetic hides; where results may be NaN, the poison must be a number. */
    memset(data, t->style == NONFINITE ? 0x88 : 0xff, bytes);
    t->buffers[t->buffer_count++] = (buffer){name, type, count, data};
    return data;
}

/* ---- inputs ---- */

uint64_t next_random(trial *t) { /* splitmix64 */
    uint64_t z = t->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

size_t pick(trial *t, size_t n) {
    return (size_t)(next_random(t) >> 32) % n;
}

/* Magnitudes: zero, subnormals, the quantizer's threshold and largest step, f16's smallest, largest and first overflow,
 * exp's clamps, the largest numbers. */
static const float EDGES[] = {
    0,
    0x1p-149f,
    0x1.fffffcp-127f,
    0x1p-126f,
    0x1.fffffep-101f,
    0x1p-100f,
    0x1p-25f,
    0x1p-24f,
    1,
    0x1.ffcp-15f,
    0x1.ffep-15f,
    0x1p-14f,
    127,
    65504,
    65520,
    0x1.ffdffep15f,
    87,
    0x1.5c0002p6f,
    88,
    0x1.600002p6f,
    0x1p126f,
    0x1.fffffep127f,
};

static float edge(trial *t) {
    float x = EDGES[pick(t, sizeof EDGES / sizeof *EDGES)];
    return pick(t, 2) ? -x : x;
}

static float finite_bits(trial *t) {
    uint32_t bits = (uint32_t)next_random(t);
    return from_bits((bits & F32_INFINITY) == F32_INFINITY ? bits & ~(uint32_t)F32_INFINITY : bits);
}

static float plain(trial *t) { /* uniform in [-4, 4) */
    return ((float)(next_random(t) >> 40) - 0x1p23f) * 0x1p-21f;
}

static float wide(trial *t) {
    return ldexpf(plain(t), (int)pick(t, 81) - 40);
}

float random_f32(trial *t) {
    switch (t->style) {
    case PLAIN: return plain(t);
    case WIDE: return wide(t);
    case TIES: return pick(t, 8) ? ((float)pick(t, 509) - 254) * 0x1p-7f : 0x1.fcp0f; /* half steps of the quantizer */
    case EDGE: return pick(t, 2) ? edge(t) : finite_bits(t);
    default: break;
    }
    static const float NONFINITES[] = {NAN, INFINITY, -INFINITY};
    return pick(t, 64) ? wide(t) : NONFINITES[pick(t, 3)];
}

float *take_f32(trial *t, const char *name, size_t count) {
    float *x = take(t, name, F32, count);
    bool constant = t->style == EDGE && pick(t, 4) == 0, f16_ties = t->style == TIES && pick(t, 2);
    float value = edge(t), unit = pick(t, 2) ? 1 : 0x1p-25f;
    for (size_t i = 0; i < count; i++)
        x[i] = constant ? value : f16_ties ? ((float)pick(t, 8191) - 4095) * unit : random_f32(t);
    return x;
}

uint16_t *take_f16(trial *t, const char *name, size_t count) {
    uint16_t *h = take(t, name, F16, count);
    for (size_t i = 0; i < count; i++) {
        if (t->style == PLAIN || t->style == TIES) {
            h[i] = mxd_f32_to_f16(random_f32(t));
        } else {
            h[i] = (uint16_t)next_random(t);
            if ((h[i] & 0x7c00) == 0x7c00 && (t->style != NONFINITE || pick(t, 4))) h[i] &= 0x83ff;
        }
    }
    return h;
}

/* ---- calls ---- */

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

bool running(trial *t) {
    if (!t->timed) return t->calls++ == 0;
    if (t->calls == 0) {
        t->target = 1;
        t->started = seconds_now();
    }
    if (t->calls == t->target) {
        double elapsed = seconds_now() - t->started;
        if (elapsed >= 0.03) {
            t->seconds = elapsed / (double)t->calls;
            return false;
        }
        t->target *= 2;
    }
    t->calls++;
    return true;
}

static void describe_fault(const trial *t, int sig, char *problem, size_t cap) {
    if (sig == SIGILL) {
        snprintf(problem, cap, "an instruction that this CPU lacks");
        return;
    }
    const uint8_t *at = fault_address;
    for (size_t i = 0; i < t->buffer_count; i++) {
        const buffer *b = &t->buffers[i];
        const uint8_t *room = regions[t->side][i], *start = b->data, *end = start + b->count * element_size(b->type);
        if (at < room - GUARD || at >= room + ROOM + GUARD) continue;
        if (at < start) snprintf(problem, cap, "touched %s, %zu bytes before its first", b->name, (size_t)(start - at));
        else snprintf(problem, cap, "touched %s, %zu bytes after its last", b->name, (size_t)(at - end) + 1);
        return;
    }
    snprintf(problem, cap, "touched address %p", fault_address);
}

bool run_trial(const op *o, trial *t, char *problem, size_t cap) {
    int sig = sigsetjmp(recovery, 1);
    if (sig) {
        describe_fault(t, sig, problem, cap);
        return false;
    }
    o->run(t);
    return true;
}

/* ---- comparison ---- */

static uint32_t element_bits(const buffer *b, size_t i) {
    uint32_t bits = 0;
    memcpy(&bits, (const uint8_t *)b->data + i * element_size(b->type), element_size(b->type)); /* little-endian */
    return bits;
}

static double element_value(const buffer *b, size_t i) {
    uint32_t bits = element_bits(b, i);
    switch (b->type) {
    case U8: return bits;
    case I8: return (int8_t)bits;
    case I16: return (int16_t)bits;
    case F16: return (double)mxd_f16_to_f32((uint16_t)bits);
    default: return (double)from_bits(bits);
    }
}

/* Return whether element i is the same in both. All NaN are: their bits are not specified. */
static bool same_element(const buffer *a, const buffer *b, size_t i) {
    return element_bits(a, i) == element_bits(b, i) || (isnan(element_value(a, i)) && isnan(element_value(b, i)));
}

bool same_buffers(const trial *reference, const trial *variant, char *problem, size_t cap) {
    for (size_t n = 0; n < reference->buffer_count; n++) {
        const buffer *a = &reference->buffers[n], *b = &variant->buffers[n];
        if (!memcmp(a->data, b->data, a->count * element_size(a->type))) continue;
        for (size_t i = 0; i < a->count; i++) {
            if (same_element(a, b, i)) continue;
            int digits = 2 * (int)element_size(a->type);
            snprintf(problem, cap, "%s[%zu] is 0x%0*x (%.9g), must be 0x%0*x (%.9g)", a->name, i, digits,
                     element_bits(b, i), element_value(b, i), digits, element_bits(a, i), element_value(a, i));
            return false;
        }
    }
    return true;
}
