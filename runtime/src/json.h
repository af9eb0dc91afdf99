/* SPDX-License-Identifier: Apache-2.0 */
/* JSON (RFC 8259): a strict parser and a writer. The parser takes valid UTF-8 only, MXD_JSON_MAX_DEPTH nested arrays and
 * objects and MXD_JSON_MAX_BYTES, and allocates once for each document. Of members with the same name the last one
 * counts, as in JavaScript and Python. A lone surrogate in an escape is refused: UTF-8 cannot hold it. */
#ifndef MXD_JSON_H
#define MXD_JSON_H

#include <stdbool.h>

#include "status.h"

enum { MXD_JSON_MAX_DEPTH = 64, MXD_JSON_MAX_BYTES = 1 << 26 };

/* ---- reading ---- */

typedef enum mxd_json_type {
    MXD_JSON_NULL,
    MXD_JSON_FALSE,
    MXD_JSON_TRUE,
    MXD_JSON_NUMBER,
    MXD_JSON_STRING,
    MXD_JSON_ARRAY,
    MXD_JSON_OBJECT
} mxd_json_type;

/* A value. What is in an array or object follows it; an object's members are a string, the name, and then the value. */
typedef struct mxd_json_node {
    mxd_json_type type;
    uint32_t end;   /* index of the first node that is not in this value */
    uint32_t start; /* in text: of a string, decoded, or of a number, as written; a NUL follows both */
    uint32_t len;   /* bytes of the same; of arrays and objects: how many items or members */
} mxd_json_node;

/* A document. Node 0 is the whole; to others 0 means that there is none. */
typedef struct mxd_json {
    mxd_json_node *nodes; /* (count) */
    char *text;
    uint32_t count;
} mxd_json;

/* Parse text[len]. MXD_ERR_ARGUMENT names what is wrong and the byte where; MXD_ERR_MEMORY. After a failure *out is
 * empty. A document takes up to 9 bytes for each byte of its text. */
mxd_status mxd_json_parse(const char *text, size_t len, mxd_json *out, mxd_error *err);
void mxd_json_free(mxd_json *doc);

/* Return the first item of an array, or the name of the first member of an object; 0: there is none. */
uint32_t mxd_json_first(const mxd_json *doc, uint32_t node);
/* Return what follows an item, or the name of a member, in the array or object `node`; 0: it was the last. */
uint32_t mxd_json_next(const mxd_json *doc, uint32_t node, uint32_t item);
/* Return the value of the last member of that name; 0: none, or `node` is not an object. */
uint32_t mxd_json_get(const mxd_json *doc, uint32_t node, const char *name);
/* Return the text of a string or number, and its length if len is not NULL. */
const char *mxd_json_text(const mxd_json *doc, uint32_t node, size_t *len);
bool mxd_json_is(const mxd_json *doc, uint32_t node, mxd_json_type type);
/* Whether the node is this string. */
bool mxd_json_equals(const mxd_json *doc, uint32_t node, const char *text);
/* Read a number as the nearest double. False: not a number, or too large for one. */
bool mxd_json_double(const mxd_json *doc, uint32_t node, double *out);
/* Read an integer, also one written like 2.0 or 1e3. False: none, or not in -2^63..2^63-1; one that is written with a
 * point or exponent has to be within 2^53. */
bool mxd_json_integer(const mxd_json *doc, uint32_t node, int64_t *out);
/* Convert the text of a number as the C locale does: a program around the library may have set LC_NUMERIC. */
double mxd_json_number(const char *text);
/* Return the word for a type. */
const char *mxd_json_type_name(mxd_json_type type);

/* ---- writing ---- */

/* A growing text. Commas are put where they belong. After a failure, which is sticky, the text is cut and nothing more
 * is written. */
typedef struct mxd_json_writer {
    char *data; /* (len), and room up to cap; of malloc() */
    size_t len, cap, limit;
    bool failed; /* more than `limit` bytes were written, or memory ran out */
    bool comma;  /* a value came before at this place */
} mxd_json_writer;

/* Begin an empty text of at most `limit` bytes. */
void mxd_json_writer_init(mxd_json_writer *w, size_t limit);
void mxd_json_writer_free(mxd_json_writer *w);
/* Open ('{', '[') or close ('}', ']'). */
void mxd_json_open(mxd_json_writer *w, char bracket);
void mxd_json_close(mxd_json_writer *w, char bracket);
/* Write the name of a member; its value comes next. */
void mxd_json_name(mxd_json_writer *w, const char *name);
/* Write a string; bytes that are not UTF-8 become U+FFFD. */
void mxd_json_put_string(mxd_json_writer *w, const char *text, size_t len);
void mxd_json_put_text(mxd_json_writer *w, const char *text);
void mxd_json_put_integer(mxd_json_writer *w, int64_t value);
/* Write the shortest number that reads back the same; NaN and infinities become null. */
void mxd_json_put_double(mxd_json_writer *w, double value);
void mxd_json_put_bool(mxd_json_writer *w, bool value);
void mxd_json_put_null(mxd_json_writer *w);
/* Write text[len], a value in JSON already. */
void mxd_json_put_raw(mxd_json_writer *w, const char *text, size_t len);
/* Write a value of a parsed document: `node` and all that is in it. */
void mxd_json_put_node(mxd_json_writer *w, const mxd_json *doc, uint32_t node);
/* Append bytes as they are, outside the document (such as "\n\n" after it): no comma, no check. */
void mxd_json_append(mxd_json_writer *w, const char *text, size_t len);

#endif
