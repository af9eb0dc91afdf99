#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "machine.h"

#include <math.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../include/mxdraft.h"

/* Read the beginning of a system file as text. MXDRAFT_SYSROOT goes before its path, so that tests can present another
 * machine. */
static bool read_text(const char *path, char *buf, size_t cap) {
    char full[512];
    const char *root = getenv("MXDRAFT_SYSROOT");
    snprintf(full, sizeof full, "%s%s", root ? root : "", path);
    FILE *f = fopen(full, "re");
    if (!f) return false;
    size_t n = fread(buf, 1, cap - 1, f);
    fclose(f);
    buf[n] = 0;
    return n > 0;
}

static bool read_number(const char *path, long long *out) {
    char text[64], *end;
    if (!read_text(path, text, sizeof text)) return false;
    *out = strtoll(text, &end, 10);
    return end != text;
}

/* Return the CPU share of the cgroup (v2, else v1), rounded down to whole CPUs but at least 1; 0 if unlimited. */
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
    /* On big.LITTLE a slow core would hold up every barrier: count only the fastest cores that we may run on. */
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
        if (capacity > best) fastest = 0;
        if (capacity >= best) {
            best = capacity;
            fastest++;
        }
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
    /* The firmware's device on a Pi up to 4, and on a Pi 5. */
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
