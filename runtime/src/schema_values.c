/* SPDX-License-Identifier: Apache-2.0 */
/* What a schema says of the values that fit it, without making its automaton. */
#include <string.h>

#include "schema.h"

static uint32_t type_bit(const mxd_json *doc, uint32_t node) {
    static const char *const names[] = {"null", "boolean", "integer", "number", "string", "array", "object"};
    for (uint32_t i = 0; i < 7; i++)
        if (mxd_json_equals(doc, node, names[i])) return 1u << i;
    return 0;
}

uint32_t mxd_schema_types(const mxd_json *doc, uint32_t node) {
    uint32_t type = mxd_json_get(doc, node, "type"), bits = 0;
    if (!type) return ALL_TYPES;
    if (!mxd_json_is(doc, type, MXD_JSON_ARRAY)) return type_bit(doc, type);
    for (uint32_t at = mxd_json_first(doc, type); at; at = mxd_json_next(doc, type, at)) {
        uint32_t bit = type_bit(doc, at);
        if (!bit) return 0;
        bits |= bit;
    }
    return bits;
}

uint32_t mxd_schema_types_of_value(const mxd_json *doc, uint32_t node) {
    int64_t integer;
    switch (doc->nodes[node].type) {
    case MXD_JSON_NULL: return NULL_BIT;
    case MXD_JSON_FALSE:
    case MXD_JSON_TRUE: return BOOLEAN_BIT;
    case MXD_JSON_NUMBER: return NUMBER_BIT | (mxd_json_integer(doc, node, &integer) ? INTEGER_BIT : 0u);
    case MXD_JSON_STRING: return STRING_BIT;
    case MXD_JSON_ARRAY: return ARRAY_BIT;
    default: return OBJECT_BIT;
    }
}

uint32_t mxd_schema_first_value(const mxd_json *doc, uint32_t node, uint32_t *list) {
    uint32_t values = mxd_json_get(doc, node, "enum"), only = mxd_json_get(doc, node, "const");
    *list = values && mxd_json_is(doc, values, MXD_JSON_ARRAY) ? values : 0;
    return *list ? mxd_json_first(doc, values) : only;
}

uint32_t mxd_schema_next_value(const mxd_json *doc, uint32_t list, uint32_t at) {
    return list ? mxd_json_next(doc, list, at) : 0;
}

/* Whether two values may be equal. */
static bool may_equal(const mxd_json *doc, uint32_t a, uint32_t b) {
    mxd_json_type type = doc->nodes[a].type;
    double x, y;
    size_t n, m;
    if (type != doc->nodes[b].type) return false;
    if (type == MXD_JSON_NUMBER && mxd_json_double(doc, a, &x) && mxd_json_double(doc, b, &y)) return x == y;
    if (type != MXD_JSON_STRING) return true;
    const char *s = mxd_json_text(doc, a, &n), *t = mxd_json_text(doc, b, &m);
    return n == m && !memcmp(s, t, n);
}

/* Whether both schemas list their values, and share none. */
static bool values_differ(const mxd_json *doc, uint32_t a, uint32_t b) {
    uint32_t list_a, list_b, first_a = mxd_schema_first_value(doc, a, &list_a),
                             first_b = mxd_schema_first_value(doc, b, &list_b);
    if (!first_a || !first_b) return false;
    for (uint32_t i = first_a; i; i = mxd_schema_next_value(doc, list_a, i))
        for (uint32_t j = first_b; j; j = mxd_schema_next_value(doc, list_b, j))
            if (may_equal(doc, i, j)) return false;
    return true;
}

bool mxd_schema_requires(const mxd_json *doc, uint32_t node, const char *name) {
    uint32_t list = mxd_json_get(doc, node, "required");
    for (uint32_t at = list ? mxd_json_first(doc, list) : 0; at; at = mxd_json_next(doc, list, at))
        if (mxd_json_equals(doc, at, name)) return true;
    return false;
}

/* Whether a property that both schemas require has values of which they share none. */
static bool property_differs(const mxd_json *doc, uint32_t a, uint32_t b) {
    uint32_t properties = mxd_json_get(doc, a, "properties"), others = mxd_json_get(doc, b, "properties");
    if (!properties || !others) return false;
    for (uint32_t at = mxd_json_first(doc, properties); at; at = mxd_json_next(doc, properties, at)) {
        const char *name = mxd_json_text(doc, at, NULL);
        uint32_t other = mxd_json_get(doc, others, name);
        if (other && mxd_schema_requires(doc, a, name) && mxd_schema_requires(doc, b, name) &&
            values_differ(doc, at + 1, other))
            return true;
    }
    return false;
}

/* Return the types that values of a schema can have, as far as it says so itself. */
static uint32_t possible_types(const mxd_json *doc, uint32_t node) {
    uint32_t list, types = 0, first = mxd_schema_first_value(doc, node, &list);
    for (uint32_t i = first; i; i = mxd_schema_next_value(doc, list, i)) types |= mxd_schema_types_of_value(doc, i);
    if (!first) types = mxd_schema_types(doc, node);
    return types & NUMBER_BIT ? types | INTEGER_BIT : types & INTEGER_BIT ? types | NUMBER_BIT : types;
}

bool mxd_schema_disjoint(const mxd_json *doc, uint32_t a, uint32_t b) {
    uint32_t of_a = possible_types(doc, a), of_b = possible_types(doc, b);
    if (!(of_a & of_b) || values_differ(doc, a, b)) return true;
    return of_a == OBJECT_BIT && of_b == OBJECT_BIT && property_differs(doc, a, b);
}
