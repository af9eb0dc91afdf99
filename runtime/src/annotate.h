/* SPDX-License-Identifier: Apache-2.0 */
/* Marks on the time line of ARM Streamline (docs/trace.md). They are nothing unless built with -DMXD_STREAMLINE and
 * with ARM's streamline_annotate.h on the include path. Only the thread that steps emits them. */
#ifndef MXD_ANNOTATE_H
#define MXD_ANNOTATE_H

enum { MXD_CHANNEL_STEP = 1, MXD_CHANNEL_PASS = 2 }; /* rows of the time line; a pass is within a step */

#ifdef MXD_STREAMLINE
#include <streamline_annotate.h>
#define MXD_ANNOTATE_SETUP() ANNOTATE_SETUP
#define MXD_ANNOTATE_BEGIN(channel, text) ANNOTATE_CHANNEL(channel, text)
#define MXD_ANNOTATE_END(channel) ANNOTATE_CHANNEL_END(channel)
#define MXD_ANNOTATE_MARK(text) ANNOTATE_MARKER_STR(text)
#else
#define MXD_ANNOTATE_SETUP() ((void)0)
#define MXD_ANNOTATE_BEGIN(channel, text) ((void)0)
#define MXD_ANNOTATE_END(channel) ((void)0)
#define MXD_ANNOTATE_MARK(text) ((void)0)
#endif

#endif
