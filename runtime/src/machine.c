/* SPDX-License-Identifier: Apache-2.0 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "machine.h"

#include <limits.h>
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
    char full[2 * PATH_MAX];
    const char *root = getenv("MXDRAFT_SYSROOT");
    int length = snprintf(full, sizeof full, "%s%s", root ? root : "", path);
    FILE *f = length > 0 && (size_t)length < sizeof full ? fopen(full, "re") : NULL;
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

/* ---- control groups (cgroups(7)) ---- */

enum { GROUP_BYTES = PATH_MAX + 64 };

/* A limit that a group or any group around it may set. */
typedef enum controller { CPU, MEMORY } controller;

/* Where a controller's groups lie, and how /proc/self/cgroup names it: by "ID:LIST:" in version 1, by "0::" in 2. */
static const struct hierarchy {
    const char *mount, *name; /* name NULL: version 2 */
} hierarchies[][2] = {
    [CPU] = {{"/sys/fs/cgroup", NULL}, {"/sys/fs/cgroup/cpu", "cpu"}},
    [MEMORY] = {{"/sys/fs/cgroup", NULL}, {"/sys/fs/cgroup/memory", "memory"}},
};

/* Return whether a comma-separated list[length] has this name. */
static bool lists(const char *list, size_t length, const char *name) {
    size_t n = strlen(name);
    for (const char *end = list + length; list < end; list += strcspn(list, ",:") + 1)
        if (strcspn(list, ",:") == n && !strncmp(list, name, n)) return true;
    return false;
}

/* Write the path of this process's group in a hierarchy to out[PATH_MAX]: "" for its root, and where it is not known or,
 * as in a container that sees only its own groups, above the root. */
static void group_path(const char *name, char *out) {
    char groups[8192];
    out[0] = '\0';
    if (!read_text("/proc/self/cgroup", groups, sizeof groups)) return;
    for (char *line = groups, *next; line && *line; line = next) {
        if ((next = strchr(line, '\n'))) *next++ = '\0';
        char *names = strchr(line, ':'), *path = names ? strchr(++names, ':') : NULL;
        if (!path || strlen(path) > PATH_MAX) continue;
        if (name ? lists(names, (size_t)(path - names), name) : path == names) strcpy(out, path + 1);
    }
    if (!strcmp(out, "/") || strstr(out, "/..")) out[0] = '\0';
}

/* Read the beginning of a group's file as text. */
static bool read_group(const char *group, const char *file, char *buf, size_t cap) {
    char path[GROUP_BYTES + 32];
    snprintf(path, sizeof path, "%s/%s", group, file);
    return read_text(path, buf, cap);
}

/* Read the number after `key` at the beginning of a line of a group's file; key "": the first number. */
static bool read_of_group(const char *group, const char *file, const char *key, long long *out) {
    char text[8192], *end;
    if (!read_group(group, file, text, sizeof text)) return false;
    const char *line = text;
    size_t n = strlen(key);
    while (n > 0 && (strncmp(line, key, n) || line[n] != ' ')) {
        if (!(line = strchr(line, '\n'))) return false;
        line++;
    }
    *out = strtoll(line + n, &end, 10);
    return end != line + n;
}

/* Return the whole CPUs that a group grants, at least 1; UINT64_MAX if it sets no limit. */
static uint64_t cpus_of_group(const char *group, bool version_1) {
    char text[64];
    long long quota, period;
    bool known = version_1 ? read_of_group(group, "cpu.cfs_quota_us", "", &quota) &&
                                 read_of_group(group, "cpu.cfs_period_us", "", &period)
                           : read_group(group, "cpu.max", text, sizeof text) &&
                                 sscanf(text, "%lld %lld", &quota, &period) == 2; /* or "max" */
    if (!known || quota <= 0 || period <= 0) return UINT64_MAX;
    return quota < period ? 1 : (uint64_t)(quota / period);
}

/* Return the bytes that a group can still use; UINT64_MAX if it sets no limit. Pages of files, such as a bundle's, count
 * as free: the kernel drops them before it refuses memory. */
static uint64_t memory_of_group(const char *group, bool version_1) {
    long long most, used, inactive = 0, active = 0;
    if (!read_of_group(group, version_1 ? "memory.limit_in_bytes" : "memory.max", "", &most) ||
        !read_of_group(group, version_1 ? "memory.usage_in_bytes" : "memory.current", "", &used))
        return UINT64_MAX;
    read_of_group(group, "memory.stat", version_1 ? "total_inactive_file" : "inactive_file", &inactive);
    read_of_group(group, "memory.stat", version_1 ? "total_active_file" : "active_file", &active);
    used -= inactive + active;
    if (used < 0) used = 0;
    return most > used ? (uint64_t)(most - used) : 0;
}

/* Return the least that this process's group and those around it grant, in both versions of control groups. */
static uint64_t least_of_groups(controller c) {
    uint64_t least = UINT64_MAX;
    for (int version_1 = 0; version_1 < 2; version_1++) {
        const struct hierarchy *h = &hierarchies[c][version_1];
        char path[PATH_MAX + 1], group[GROUP_BYTES];
        group_path(h->name, path);
        for (;;) {
            snprintf(group, sizeof group, "%s%s", h->mount, path);
            uint64_t granted = c == CPU ? cpus_of_group(group, version_1) : memory_of_group(group, version_1);
            if (granted < least) least = granted;
            char *last = strrchr(path, '/');
            if (!last) break;
            *last = '\0';
        }
    }
    return least;
}

/* ---- threads ---- */

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
    unsigned threads = best >= 0 ? fastest : allowed;
    uint64_t quota = least_of_groups(CPU);
    if (quota < threads) threads = (unsigned)quota;
    return threads < 1 ? 1 : threads > 64 ? 64 : threads;
}

/* ---- memory ---- */

static uint64_t meminfo_available(void) {
    char text[4096];
    if (!read_text("/proc/meminfo", text, sizeof text)) return UINT64_MAX;
    const char *p = strstr(text, "MemAvailable:");
    return p ? strtoull(p + 13, NULL, 10) * 1024 : UINT64_MAX;
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
    uint64_t available = meminfo_available(), group = least_of_groups(MEMORY), space = address_space_left(mapped);
    if (group < available) available = group;
    return space < available ? space : available;
}

/* Return a number of /proc/self/status in bytes, 0 if unknown; `format` reads KiB. */
static uint64_t status_bytes(const char *format) {
    FILE *f = fopen("/proc/self/status", "re");
    if (!f) return 0;
    char line[256];
    unsigned long long kib = 0;
    while (fgets(line, sizeof line, f))
        if (sscanf(line, format, &kib) == 1) break;
    fclose(f);
    return kib * 1024;
}

uint64_t mxd_peak_rss(void) {
    /* Not getrusage: its peak survives exec, so it would show that of whoever started this program. */
    return status_bytes("VmHWM: %llu");
}

uint64_t mxd_rss(void) {
    return status_bytes("VmRSS: %llu");
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
