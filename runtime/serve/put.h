/* SPDX-License-Identifier: Apache-2.0 */
/* Members of a JSON object. */
#ifndef MXDRAFT_SERVE_PUT_H
#define MXDRAFT_SERVE_PUT_H

#include "../src/json.h"

static inline void put_text(mxd_json_writer *w, const char *name, const char *text) {
    mxd_json_name(w, name);
    mxd_json_put_text(w, text);
}

static inline void put_string(mxd_json_writer *w, const char *name, const char *text, size_t length) {
    mxd_json_name(w, name);
    mxd_json_put_string(w, text ? text : "", length);
}

static inline void put_whole(mxd_json_writer *w, const char *name, uint64_t value) {
    mxd_json_name(w, name);
    mxd_json_put_integer(w, (int64_t)value);
}

static inline void put_number(mxd_json_writer *w, const char *name, double value) {
    mxd_json_name(w, name);
    mxd_json_put_double(w, value);
}

static inline void put_flag(mxd_json_writer *w, const char *name, bool value) {
    mxd_json_name(w, name);
    mxd_json_put_bool(w, value);
}

static inline void put_null(mxd_json_writer *w, const char *name) {
    mxd_json_name(w, name);
    mxd_json_put_null(w);
}

/* Open a member that is an object or array. */
static inline void put_open(mxd_json_writer *w, const char *name, char bracket) {
    mxd_json_name(w, name);
    mxd_json_open(w, bracket);
}

#endif
