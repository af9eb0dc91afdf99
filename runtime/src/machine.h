/* SPDX-License-Identifier: Apache-2.0 */
/* The machine around this process: CPUs it may run on, memory it may use, caches, temperature. */
#ifndef MXD_MACHINE_H
#define MXD_MACHINE_H

#include <stdint.h>

/* Return the bytes that this process can still use: the least of MemAvailable, cgroup limit and address-space limit.
 * `mapped` bytes are mapped already, so they do not count against the address-space limit again. */
uint64_t mxd_memory_available(uint64_t mapped);
/* Return the most bytes this process ever had in memory, 0 if unknown. */
uint64_t mxd_peak_rss(void);
/* Return the bytes that it has in memory now, 0 if unknown. */
uint64_t mxd_rss(void);
/* Return the bytes of the first CPU's largest cache, 0 if unknown. */
uint64_t mxd_last_level_cache(void);
/* Return the temperature of the hottest thermal zone in degrees Celsius, NaN if there is none. */
double mxd_temperature(void);
/* Return what `vcgencmd get_throttled` prints on a Raspberry Pi, -1 elsewhere. Bits 0..3: under-voltage, frequency
 * capped, throttled, soft temperature limit, all at this moment; bits 16..19: the same at any time since the start. */
int64_t mxd_throttle_flags(void);

#endif
