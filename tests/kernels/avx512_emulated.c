/* SPDX-License-Identifier: Apache-2.0 */
/* runtime/kernels/x86/avx512.c for any machine: the intrinsics that it uses, as functions written from their
 * descriptions in the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2. */
#include <math.h>
#include <string.h>

#include "../../runtime/kernels/kernels.h"

typedef union emulated {
    uint8_t u8[64];
    int8_t i8[64];
    uint16_t u16[32];
    int32_t i32[16];
    uint32_t u32[16];
    float f32[16];
} emulated;

/* Macros, since the compiler's own headers may have declared these names. */
#define __m512i emulated
#define __m512 emulated
#define __m256i emulated
#define __m128i emulated_bytes
typedef struct emulated_bytes {
    uint8_t u8[16];
} emulated_bytes;

#define NOINLINE __attribute__((noinline)) /* compiles in a fraction of the time */

#define DEFINE(name, parameters, n, statement)            \
    static NOINLINE emulated emulated_##name parameters { \
        emulated r;                                       \
        for (int i = 0; i < (n); i++) statement;          \
        return r;                                         \
    }

DEFINE(set1_epi8, (int x), 64, r.u8[i] = (uint8_t)x)
DEFINE(set1_epi32, (int32_t x), 16, r.i32[i] = x)
DEFINE(set1_ps, (float x), 16, r.f32[i] = x)
DEFINE(broadcast, (emulated_bytes a), 64, r.u8[i] = a.u8[i % 16])
DEFINE(and, (emulated a, emulated b), 16, r.u32[i] = a.u32[i] & b.u32[i])
DEFINE(xor, (emulated a, emulated b), 16, r.u32[i] = a.u32[i] ^ b.u32[i])
DEFINE(shuffle, (emulated a, emulated at), 64, r.u8[i] = at.u8[i] & 128 ? 0 : a.u8[i / 16 * 16 + at.u8[i] % 16])
DEFINE(srli_epi16, (emulated a, int n), 32, r.u16[i] = (uint16_t)(a.u16[i] >> n))
DEFINE(slli_epi32, (emulated a, int n), 16, r.u32[i] = a.u32[i] << n)
DEFINE(sllv_epi32, (emulated a, emulated n), 16, r.u32[i] = a.u32[i] << n.u32[i])
DEFINE(cvtepu8_epi32, (emulated_bytes a), 16, r.u32[i] = a.u8[i])
DEFINE(max_epi32, (emulated a, emulated b), 16, r.i32[i] = a.i32[i] > b.i32[i] ? a.i32[i] : b.i32[i])
DEFINE(add_epi32, (emulated a, emulated b), 16, r.u32[i] = a.u32[i] + b.u32[i])
DEFINE(sub_epi32, (emulated a, emulated b), 16, r.u32[i] = a.u32[i] - b.u32[i])
DEFINE(cvtepi32_ps, (emulated a), 16, r.f32[i] = (float)a.i32[i])
DEFINE(mul_ps, (emulated a, emulated b), 16, r.f32[i] = a.f32[i] * b.f32[i])
DEFINE(fmadd_ps, (emulated a, emulated b, emulated c), 16, r.f32[i] = fmaf(a.f32[i], b.f32[i], c.f32[i]))
DEFINE(fnmadd_ps, (emulated a, emulated b, emulated c), 16, r.f32[i] = fmaf(-a.f32[i], b.f32[i], c.f32[i]))
DEFINE(add_ps, (emulated a, emulated b), 16, r.f32[i] = a.f32[i] + b.f32[i])
DEFINE(sub_ps, (emulated a, emulated b), 16, r.f32[i] = a.f32[i] - b.f32[i])
DEFINE(min_ps, (emulated a, emulated b), 16, r.f32[i] = a.f32[i] < b.f32[i] ? a.f32[i] : b.f32[i])
DEFINE(max_ps, (emulated a, emulated b), 16, r.f32[i] = a.f32[i] > b.f32[i] ? a.f32[i] : b.f32[i])
DEFINE(round_ps, (emulated a), 16, r.f32[i] = rintf(a.f32[i]))
DEFINE(cvtps_epi32, (emulated a), 16, r.i32[i] = a.f32[i] == a.f32[i] ? (int32_t)rintf(a.f32[i]) : INT32_MIN)
DEFINE(cvtph_ps, (emulated a), 16, r.f32[i] = mxd_f16_to_f32(a.u16[i]))
/* Pick with two bits of `at` for each of four: of four lanes, quarters (of a, a, b, b); of the lanes of a quarter. */
DEFINE(shuffle_f32x4, (emulated a, emulated b, int at), 16,
       r.f32[i] = (i < 8 ? a : b).f32[4 * (at >> i / 4 * 2 & 3) + i % 4])
DEFINE(shuffle_ps, (emulated a, emulated b, int at), 16,
       r.f32[i] = (i % 4 < 2 ? a : b).f32[i / 4 * 4 + (at >> i % 4 * 2 & 3)])
/* Multiply unsigned bytes of a by signed ones of b; add four neighbours to the sum, without saturation. */
DEFINE(dpbusd, (emulated sum, emulated a, emulated b), 16,
       r.i32[i] = sum.i32[i] + a.u8[4 * i] * b.i8[4 * i] + a.u8[4 * i + 1] * b.i8[4 * i + 1] +
                  a.u8[4 * i + 2] * b.i8[4 * i + 2] + a.u8[4 * i + 3] * b.i8[4 * i + 3])

static NOINLINE emulated emulated_load(const void *p) {
    emulated r;
    memcpy(&r, p, sizeof r);
    return r;
}

static NOINLINE emulated emulated_load_half(const void *p) {
    emulated r = {.u8 = {0}};
    memcpy(&r, p, sizeof r / 2);
    return r;
}

static emulated_bytes emulated_load_bytes(const void *p) {
    emulated_bytes r;
    memcpy(&r, p, sizeof r);
    return r;
}

static void emulated_store(float *p, emulated a) {
    memcpy(p, &a, sizeof a);
}

#define _mm512_loadu_si512 emulated_load
#define _mm512_loadu_ps emulated_load
#define _mm512_storeu_ps emulated_store
#define _mm256_loadu_si256 emulated_load_half
#define _mm_loadu_si128 emulated_load_bytes
#define _mm512_set1_epi8 emulated_set1_epi8
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_setzero_ps() emulated_set1_ps(0)
#define _mm512_broadcast_i32x4 emulated_broadcast
#define _mm512_and_si512 emulated_and
#define _mm512_xor_si512 emulated_xor
#define _mm512_shuffle_epi8 emulated_shuffle
#define _mm512_srli_epi16 emulated_srli_epi16
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_sllv_epi32 emulated_sllv_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_max_epi32 emulated_max_epi32
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_sub_epi32 emulated_sub_epi32
#define _mm512_castsi512_ps(a) (a)
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_fnmadd_ps emulated_fnmadd_ps
#define _mm512_add_ps emulated_add_ps
#define _mm512_sub_ps emulated_sub_ps
#define _mm512_min_ps emulated_min_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_roundscale_ps(a, mode) emulated_round_ps(a)
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4
#define _mm512_shuffle_ps emulated_shuffle_ps
#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _mm_prefetch(address, hint) ((void)(address)) /* any address: it never faults */

#define TARGET
#define INLINE static
#define UNROLL
#define MXD_EMULATED_AVX512
#define mxd_kernels_init_avx512 init_emulated_avx512
#include "../../runtime/kernels/x86/avx512.c"
