/* SPDX-License-Identifier: Apache-2.0 */
/* Included before every file that `make analyze` checks: shows the analyzer, which sees one file at a time, that
 * mxd_fail() returns its `code`. Without it, every error path looks as if it might go on. */
#include "../../runtime/src/status.h"

#define mxd_fail(err, code, ...) ((mxd_fail)(err, code, __VA_ARGS__), (code))
