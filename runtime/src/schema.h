/* SPDX-License-Identifier: Apache-2.0 */
/* JSON schemas become pieces of an automaton (docs/structured-output.md says which, and how documents are written). */
#ifndef MXD_SCHEMA_H
#define MXD_SCHEMA_H

#include "automaton.h"
#include "json.h"

/* Make the piece that takes the documents of the schema at `node`; references start there, too. MXD_ERR_ARGUMENT names
 * what is not supported, and where. */
mxd_status mxd_schema_piece(mxd_nfa *nfa, const mxd_json *doc, uint32_t node, mxd_piece *out, mxd_error *err);
/* Make the piece that takes a call of one of `tools`, or of the one called `name` if that is not NULL:
 * {"name": ..., "arguments": ...}. A tool is {"type": "function", "function": F} or F itself, which has a name and may
 * have parameters, a schema. */
mxd_status mxd_schema_tools(mxd_nfa *nfa, const mxd_json *tools, const char *name, mxd_piece *out, mxd_error *err);

/* ---- schema_text.c: pieces for JSON texts ---- */

/* What a repeated piece is made of. */
typedef mxd_piece mxd_piece_maker(mxd_nfa *n, void *arg);

/* Repeat a piece `min` to `max` times (UINT32_MAX: without end), with `separator` in between. */
mxd_piece mxd_piece_times(mxd_nfa *n, mxd_piece_maker *make, void *arg, const char *separator, uint32_t min,
                          uint32_t max);
mxd_piece mxd_piece_text(mxd_nfa *n, const char *text);
/* A string of min..max characters. */
mxd_piece mxd_piece_string(mxd_nfa *n, uint32_t min, uint32_t max);
/* An integer of up to 15 digits, which every reader of JSON keeps exact; a number with up to as many after the point, and
 * an exponent of up to 2. */
mxd_piece mxd_piece_number(mxd_nfa *n, bool integer);
/* The value at `node`, written. */
mxd_piece mxd_piece_literal(mxd_nfa *n, const mxd_json *doc, uint32_t node);
/* Any value with up to `depth` nested arrays and objects; any object around such. */
mxd_piece mxd_piece_any(mxd_nfa *n, int depth);
mxd_piece mxd_piece_any_array(mxd_nfa *n, int depth, uint32_t min, uint32_t max);
mxd_piece mxd_piece_any_object(mxd_nfa *n, int depth);

/* ---- schema_values.c: what a schema says of its values ---- */

/* Types of JSON as bits; an integer is a number, too. */
enum {
    NULL_BIT = 1,
    BOOLEAN_BIT = 2,
    INTEGER_BIT = 4,
    NUMBER_BIT = 8,
    STRING_BIT = 16,
    ARRAY_BIT = 32,
    OBJECT_BIT = 64
};
enum { ALL_TYPES = 127 };

/* Return the types that the keyword "type" names, all without it; 0: it is no such word or list. */
uint32_t mxd_schema_types(const mxd_json *doc, uint32_t node);
/* Return all types that a value has. */
uint32_t mxd_schema_types_of_value(const mxd_json *doc, uint32_t value);
/* Return the first of the values that "enum" or "const" allows (0: none), and in *list the array around it, 0 for "const";
 * then the one after another. */
uint32_t mxd_schema_first_value(const mxd_json *doc, uint32_t node, uint32_t *list);
uint32_t mxd_schema_next_value(const mxd_json *doc, uint32_t list, uint32_t at);
/* Whether "required" lists a property. */
bool mxd_schema_requires(const mxd_json *doc, uint32_t node, const char *name);
/* Whether no value fits both schemas, so far as that is easily seen: other types, other values of "enum" and "const", or
 * such values of a property that both require. References are not followed. */
bool mxd_schema_disjoint(const mxd_json *doc, uint32_t a, uint32_t b);

#endif
