/* Private: records of drafted tokens (mxd_seq_drafts). */
#ifndef MXD_MONITOR_H
#define MXD_MONITOR_H

#include "engine.h"

/* Begin the records of a step with all that is proposed for a sequence. */
void mxd_monitor_proposed(mxd_seq *s);
/* What is left of the proposal was verified. */
void mxd_monitor_verified(mxd_seq *s);
/* The target chose this token behind the newest one: so what was proposed there and had no place was right or not, and
 * its kind is learned about for nothing. */
void mxd_monitor_chosen(const mxd_seq *s, uint32_t token);

#endif
