#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cpu.h"

#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

/* ---- instruction sets ---- */

#if defined(__x86_64__)
/* Register state that the system saves: 0 if it doesn't say. */
static unsigned saved_state(void) {
    unsigned a, b, c, d, xcr0, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return 0; /* OSXSAVE */
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return xcr0;
}

static int has_avx2(void) {
    unsigned a, b, c, d;
    const unsigned need = 1u << 12 | 1u << 28 | 1u << 29; /* FMA, AVX, F16C */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need) != need || (saved_state() & 0x6) != 0x6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 5);
}

static int has_avx512(void) {
    unsigned a, b, c, d;
    const unsigned need = 1u << 16 | 1u << 30 | 1u << 31; /* F, BW, VL */
    if ((saved_state() & 0xe6) != 0xe6 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b & need) == need && (c & 1u << 11); /* VNNI */
}
#elif defined(__aarch64__)
static int has_neon(void) {
    return 1; /* part of armv8.0-a */
}
static int has_dotprod(void) {
    return (getauxval(AT_HWCAP) & 1u << 20) != 0; /* HWCAP_ASIMDDP */
}
static int has_i8mm(void) {
    return has_dotprod() && (getauxval(AT_HWCAP2) & 1u << 13) != 0; /* HWCAP2_I8MM */
}
#endif

/* Oldest first: each level overwrites what it does better. Names of the other architecture are known but absent. */
static const mxd_cpu_level LEVELS[] = {
#if defined(__x86_64__)
    {"avx2", has_avx2, mxd_kernels_init_avx2},
    {"avx512", has_avx512, mxd_kernels_init_avx512},
#else
    {"avx2", NULL, NULL},
    {"avx512", NULL, NULL},
#endif
#if defined(__aarch64__)
    {"neon", has_neon, mxd_kernels_init_neon},
    {"dotprod", has_dotprod, mxd_kernels_init_dotprod},
    {"i8mm", has_i8mm, mxd_kernels_init_i8mm},
#else
    {"neon", NULL, NULL},
    {"dotprod", NULL, NULL},
    {"i8mm", NULL, NULL},
#endif
};
enum { LEVEL_COUNT = sizeof LEVELS / sizeof *LEVELS };

const mxd_cpu_level *mxd_cpu_levels(size_t *count) {
    *count = LEVEL_COUNT;
    return LEVELS;
}

static mxd_status parse_mask(int masked[LEVEL_COUNT], mxd_error *err) {
    const char *p = getenv("MXDRAFT_CPU_MASK");
    while (p && *p) {
        size_t len = strcspn(p, ",");
        int known = len == 0;
        for (int i = 0; i < LEVEL_COUNT; i++)
            if (len == strlen(LEVELS[i].name) && !memcmp(p, LEVELS[i].name, len)) known = masked[i] = 1;
        if (!known)
            return mxd_fail(err, MXD_ERR_ARGUMENT,
                            "MXDRAFT_CPU_MASK: unknown level '%.*s' (known: avx2, avx512, neon, dotprod, i8mm)", (int)len, p);
        p += len + (p[len] == ',');
    }
    return MXD_OK;
}

mxd_status mxd_cpu_bind(mxd_kernels *kernels, mxd_kernel_names *names, mxd_error *err) {
    int masked[LEVEL_COUNT] = {0};
    mxd_status status = parse_mask(masked, err);
    if (status) return status;
    mxd_kernels_init_ref(kernels, names);
    for (int i = 0; i < LEVEL_COUNT; i++)
        if (!masked[i] && LEVELS[i].present && LEVELS[i].present()) LEVELS[i].init(kernels, names);
    return MXD_OK;
}

size_t mxd_cpu_describe(char *buf, size_t cap) {
    mxd_kernels kernels;
    mxd_kernel_names n;
    mxd_error err;
    int len;
    if (mxd_cpu_bind(&kernels, &n, &err)) {
        len = snprintf(buf, cap, "error %s\n", err.message);
    } else {
        len = snprintf(buf, cap,
                       "quantize %s\nmatmul_mxfp4 %s\nmatmul_mxint8 %s\nrmsnorm %s\nrope %s\nattention %s\n"
                       "attention_mx %s\nhadamard %s\nstore_mxint8 %s\nstore_mxfp4 %s\nstore_normal4 %s\n"
                       "silu_mul %s\nadd %s\nto_f16 %s\nexp_weights %s\n",
                       n.quantize, n.matmul_mxfp4, n.matmul_mxint8, n.rmsnorm, n.rope, n.attention,
                       n.attention_mx, n.hadamard, n.store_mxint8, n.store_mxfp4, n.store_normal4, n.silu_mul,
                       n.add, n.to_f16, n.exp_weights);
    }
    return (size_t)len;
}

/* ---- threads and memory, read from the system's files ----
 * MXDRAFT_SYSROOT is put before /sys and /proc paths, so that tests can present another machine. */

static int read_text(const char *path, char *buf, size_t cap) {
    char full[512];
    const char *root = getenv("MXDRAFT_SYSROOT");
    snprintf(full, sizeof full, "%s%s", root ? root : "", path);
    FILE *f = fopen(full, "re");
    if (!f) return 0;
    size_t n = fread(buf, 1, cap - 1, f);
    fclose(f);
    buf[n] = 0;
    return n > 0;
}

static int read_number(const char *path, long long *out) {
    char text[64], *end;
    if (!read_text(path, text, sizeof text)) return 0;
    *out = strtoll(text, &end, 10);
    return end != text;
}

/* CPU share of the cgroup (v2, else v1) rounded down to whole CPUs, at least 1; 0 if unlimited. */
static unsigned cgroup_cpus(void) {
    char text[64];
    long long quota = 0, period = 0;
    if (read_text("/sys/fs/cgroup/cpu.max", text, sizeof text)) {
        if (sscanf(text, "%lld %lld", &quota, &period) != 2) return 0; /* "max" */
    } else if (!read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", &quota) ||
               !read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us", &period)) {
        return 0;
    }
    if (quota <= 0 || period <= 0) return 0;
    return quota < period ? 1 : (unsigned)(quota / period);
}

uint32_t mxd_default_threads(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    /* On big.LITTLE a slow core would hold up every barrier: count only the fastest class we may run on. */
    unsigned allowed = 0, fastest = 0;
    long long best = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &set)) continue;
        allowed++;
        char path[128];
        long long capacity = -1;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpu_capacity", cpu);
        if (!read_number(path, &capacity)) {
            snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/cpufreq/cpuinfo_max_freq", cpu);
            read_number(path, &capacity);
        }
        if (capacity > best) best = capacity, fastest = 0;
        if (capacity == best) fastest++;
    }
    unsigned threads = best >= 0 ? fastest : allowed, quota = cgroup_cpus();
    if (quota && quota < threads) threads = quota;
    return threads < 1 ? 1 : threads > 64 ? 64 : threads;
}

static uint64_t meminfo_available(void) {
    char text[4096];
    if (!read_text("/proc/meminfo", text, sizeof text)) return UINT64_MAX;
    const char *p = strstr(text, "MemAvailable:");
    return p ? strtoull(p + 13, NULL, 10) * 1024 : UINT64_MAX;
}

static uint64_t cgroup_memory(void) {
    long long max, current;
    if ((read_number("/sys/fs/cgroup/memory.max", &max) && read_number("/sys/fs/cgroup/memory.current", &current)) ||
        (read_number("/sys/fs/cgroup/memory/memory.limit_in_bytes", &max) &&
         read_number("/sys/fs/cgroup/memory/memory.usage_in_bytes", &current)))
        return max > current ? (uint64_t)(max - current) : 0;
    return UINT64_MAX;
}

static uint64_t address_space_left(uint64_t mapped) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) || limit.rlim_cur == RLIM_INFINITY) return UINT64_MAX;
    FILE *f = fopen("/proc/self/statm", "re");
    unsigned long long pages = 0;
    if (f) {
        if (fscanf(f, "%llu", &pages) != 1) pages = 0;
        fclose(f);
    }
    uint64_t used = pages * (uint64_t)sysconf(_SC_PAGESIZE);
    return limit.rlim_cur > used ? limit.rlim_cur - used + mapped : mapped;
}

uint64_t mxd_memory_available(uint64_t mapped) {
    uint64_t available = meminfo_available(), group = cgroup_memory(), space = address_space_left(mapped);
    if (group < available) available = group;
    return space < available ? space : available;
}

uint64_t mxd_peak_rss(void) {
    /* Not getrusage: its peak survives exec, so it would show that of whoever started this program. */
    FILE *f = fopen("/proc/self/status", "re");
    if (!f) return 0;
    char line[256];
    unsigned long long kib = 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "VmHWM: %llu", &kib) == 1) break;
    fclose(f);
    return kib * 1024;
}

/* ---- caches and heat ---- */

uint64_t mxd_last_level_cache(void) {
    uint64_t largest = 0;
    for (int index = 0; index < 8; index++) {
        char path[128], text[64], unit = 0;
        unsigned long long size;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        if (!read_text(path, text, sizeof text) || sscanf(text, "%llu%c", &size, &unit) < 1) continue;
        size <<= unit == 'K' ? 10 : unit == 'M' ? 20 : 0;
        if (size > largest) largest = size;
    }
    return largest;
}

double mxd_temperature(void) {
    double hottest = NAN;
    for (int zone = 0; zone < 64; zone++) {
        char path[128];
        long long millidegrees;
        snprintf(path, sizeof path, "/sys/class/thermal/thermal_zone%d/temp", zone);
        if (read_number(path, &millidegrees)) hottest = fmax(hottest, 1e-3 * (double)millidegrees);
    }
    return hottest;
}

int64_t mxd_throttle_flags(void) {
    /* Where the firmware's device hangs on a Pi up to 4, and on a Pi 5. */
    static const char *const paths[] = {
        "/sys/devices/platform/soc/soc:firmware/get_throttled",
        "/sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled",
    };
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        char text[64], *end;
        if (!read_text(paths[i], text, sizeof text)) continue;
        unsigned long flags = strtoul(text, &end, 16);
        if (end != text) return (int64_t)(flags & UINT32_MAX);
    }
    return -1;
}
