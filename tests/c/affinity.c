/* Stands in for sched_getaffinity(): a test says on which of the first 64 CPUs the process may run. */
#include <sched.h>
#include <stdint.h>

static uint64_t allowed = 1;

void allow_cpus(uint64_t mask) {
    allowed = mask;
}

int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    (void)pid;
    CPU_ZERO_S(size, set);
    for (int cpu = 0; cpu < 64; cpu++)
        if (allowed >> cpu & 1) CPU_SET_S(cpu, size, set);
    return 0;
}
