/* SPDX-License-Identifier: Apache-2.0 */
/* A trial: one call of one kernel, with its buffers between guard pages. A check runs the same case twice, once with
 * the reference and once with a variant, and compares every buffer bit by bit. */
#ifndef HARNESS_H
#define HARNESS_H

#include "../../runtime/kernels/level.h"

enum { MAX_SIZES = 5, MAX_BUFFERS = 12, MAX_BENCH = 7 };

typedef enum element { U8, I8, I16, F16, F32 } element;

/* The look of inputs. */
typedef enum style {
    PLAIN,     /* values of a model */
    WIDE,      /* any sign and magnitude, all scale codes */
    TIES,      /* halfway between two roundings; integers at their extremes */
    EDGE,      /* zeros, subnormals, the largest numbers, thresholds of the kernels; half of them any finite bits */
    NONFINITE, /* WIDE with NaN and Inf */
    STYLES
} style;

typedef struct buffer {
    const char *name;
    element type;
    size_t count;
    void *data;
} buffer;

typedef struct trial {
    const mxd_kernels *kernels;
    const size_t *size; /* MAX_SIZES numbers, which the op names */
    style style;
    int side;        /* 0 or 1: which set of regions */
    bool at_end;     /* buffers end at a guard page, else they begin at one */
    bool timed;      /* call until the time is known */
    uint64_t random; /* state of the generator */
    buffer buffers[MAX_BUFFERS];
    size_t buffer_count;
    uint64_t calls, target;
    double started, seconds; /* of one call, if timed */
} trial;

typedef struct op {
    const char *name;
    size_t pointer_at, name_at; /* in mxd_kernels and mxd_kernel_names */
    const char *size_names[MAX_SIZES];
    /* Write combination number `index` of sizes to check; return false after the last. */
    bool (*sizes)(size_t index, size_t size[MAX_SIZES]);
    size_t bench[MAX_BENCH][MAX_SIZES]; /* sizes to time, ended by a zero */
    /* Make the buffers of a trial and call the kernel `while (running(t))`. */
    void (*run)(trial *t);
} op;

extern const op OPS[];
extern const size_t OP_COUNT;

/* The level avx512 in plain C, for machines that lack it (avx512_emulated.c). */
void init_emulated_avx512(mxd_kernels *k, mxd_kernel_names *n);

/* A level whose kernels are all wrong, each in its own way: proof that the harness notices. */
void init_broken(mxd_kernels *k, mxd_kernel_names *n);
/* Levels whose sum of two planes is wrong: without rho; with rho off by one; with the base's scale. */
void init_rho_ignored(mxd_kernels *k, mxd_kernel_names *n);
void init_rho_off(mxd_kernels *k, mxd_kernel_names *n);
void init_scale_of_base(mxd_kernels *k, mxd_kernel_names *n);

/* Map the regions that hold buffers, and catch accesses to their guards. */
void harness_init(void);

/* Take a buffer for the parameter `name`, in the same order in every trial of an op. `take` is for outputs and fills
 * with poison; the others are for inputs and fill by style. */
void *take(trial *t, const char *name, element type, size_t count);
float *take_f32(trial *t, const char *name, size_t count);
uint16_t *take_f16(trial *t, const char *name, size_t count);

uint64_t next_random(trial *t);
size_t pick(trial *t, size_t n); /* uniform over 0 .. n-1 */
float random_f32(trial *t);

/* Return true once; in a timed trial, until there were enough calls. */
bool running(trial *t);

/* Both return whether all is well; if not, they describe the fault in `problem`. */
bool run_trial(const op *o, trial *t, char *problem, size_t cap);
bool same_buffers(const trial *reference, const trial *variant, char *problem, size_t cap);

#endif
