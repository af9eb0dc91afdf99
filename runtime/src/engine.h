/* SPDX-License-Identifier: Apache-2.0 */
/* What the runtime does with an engine beyond the public functions. */
#ifndef MXD_ENGINE_H
#define MXD_ENGINE_H

#include "internal.h"

/* Check that no call that runs rows is under way, and that this process has the engine's threads. MXD_ERR_ARGUMENT. */
mxd_status mxd_engine_idle(const mxd_engine *g, mxd_error *err);
/* The same, and begin such a call; mxd_engine_leave() must follow. */
mxd_status mxd_engine_enter(mxd_engine *g, mxd_error *err);
void mxd_engine_leave(mxd_engine *g);

/* Return the policy as it is now, within a step or not. */
mxd_policy mxd_engine_policy(const mxd_engine *g);

#endif
