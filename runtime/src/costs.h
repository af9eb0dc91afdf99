/* What steps cost on this machine, by their rows: measured once, kept in a file. */
#ifndef MXD_COSTS_H
#define MXD_COSTS_H

#include "status.h"

/* Seconds of a step of `rows` rows that want their winner, at positions from `position` on of the first
 * sequence's cache; what they compute is of no matter. */
mxd_status mxd_time_rows(mxd_engine *g, uint32_t position, uint32_t rows, int precision, double *seconds,
                         mxd_error *err);

/* Everything that the costs depend on, as text. */
void mxd_costs_describe(const mxd_engine *g, char *out, size_t cap);

#endif
