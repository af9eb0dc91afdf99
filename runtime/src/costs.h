/* SPDX-License-Identifier: Apache-2.0 */
/* What steps cost on this machine, by their rows: measured once, kept in a file. */
#ifndef MXD_COSTS_H
#define MXD_COSTS_H

#include "status.h"

/* Measure the seconds of a pass of `rows` rows of sequence slot 0, from about `position` on, each with its winner for
 * output. What they compute does not matter. */
mxd_status mxd_time_rows(mxd_engine *g, uint32_t position, uint32_t rows, int precision, double *seconds,
                         mxd_error *err);
/* Write everything that the costs depend on, as text. */
void mxd_costs_describe(const mxd_engine *g, char *out, size_t cap);

#endif
