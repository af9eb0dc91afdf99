/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for sched_getaffinity(): a test says on which of the first 128 CPUs the process may run. */
#include <sched.h>
#include <stdint.h>

static uint64_t allowed[2] = {1, 0};

void allow_cpus(uint64_t first, uint64_t second) {
    allowed[0] = first;
    allowed[1] = second;
}

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    (void)pid;
    CPU_ZERO_S(size, set);
    for (int cpu = 0; cpu < 128; cpu++)
        if (allowed[cpu / 64] >> cpu % 64 & 1) CPU_SET_S(cpu, size, set);
    return 0;
}
