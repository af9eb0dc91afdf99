/* What the runtime does with an engine beyond the public functions. */
#ifndef MXD_ENGINE_H
#define MXD_ENGINE_H

#include "internal.h"

/* Return the policy as it is now, within a step or not. */
mxd_policy mxd_engine_policy(const mxd_engine *g);

#endif
