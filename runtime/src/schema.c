/* SPDX-License-Identifier: Apache-2.0 */
#include "schema.h"

#include <stdio.h>
#include <string.h>

#include "utf8.h"

enum { MAX_REFERENCES = 32, PATH = 160, OPEN_DEPTH = 3, MAX_COUNT = 4096 };

/* A schema under work. */
typedef struct compiler {
    mxd_nfa *n;
    const mxd_json *doc;
    uint32_t root; /* where references start */
    uint32_t active[MAX_REFERENCES], active_count;
    char path[PATH]; /* a JSON pointer to the schema under work */
    mxd_status status;
    mxd_error *err;
} compiler;

static mxd_piece compile(compiler *c, uint32_t node);

static const mxd_piece NOTHING = {0, 0};

/* ---- refusals ---- */

/* Refuse the schema, unless it is already. */
static mxd_piece refuse(compiler *c, const char *what, const char *name) {
    if (!c->status)
        c->status = mxd_fail(c->err, MXD_ERR_ARGUMENT, "schema: %s%s%s%s at #%s", name ? "'" : "", name ? name : "",
                             name ? "' " : "", what, c->path);
    return NOTHING;
}

/* Extend the path; returns its length before, for leave(). */
static size_t enter(compiler *c, const char *step, const char *name) {
    size_t before = strlen(c->path);
    snprintf(c->path + before, PATH - before, name ? "/%s/%s" : "/%s", step, name);
    size_t len = strlen(c->path);
    c->path[len - mxd_utf8_incomplete((const uint8_t *)c->path, len)] = 0; /* where it was cut */
    return before;
}

static void leave(compiler *c, size_t before) {
    c->path[before] = 0;
}

/* ---- keywords ---- */

typedef enum keyword_group { ANNOTATION, TYPE, VALUES, CHOICE, OBJECT, ARRAY, STRING, GROUPS } keyword_group;

static const struct {
    const char *name;
    keyword_group group;
} KEYWORDS[] = {
    {"title", ANNOTATION},      {"description", ANNOTATION},
    {"default", ANNOTATION},    {"example", ANNOTATION},
    {"examples", ANNOTATION},   {"$schema", ANNOTATION},
    {"$id", ANNOTATION},        {"$comment", ANNOTATION},
    {"$defs", ANNOTATION},      {"definitions", ANNOTATION},
    {"deprecated", ANNOTATION}, {"readOnly", ANNOTATION},
    {"writeOnly", ANNOTATION},  {"type", TYPE},
    {"enum", VALUES},           {"const", VALUES},
    {"anyOf", CHOICE},          {"oneOf", CHOICE},
    {"$ref", CHOICE},           {"properties", OBJECT},
    {"required", OBJECT},       {"additionalProperties", OBJECT},
    {"items", ARRAY},           {"minItems", ARRAY},
    {"maxItems", ARRAY},        {"minLength", STRING},
    {"maxLength", STRING},
};

/* Count the keywords of a schema by group; refuse what is not known. */
static bool count_keywords(compiler *c, uint32_t node, uint32_t count[GROUPS]) {
    memset(count, 0, GROUPS * sizeof *count);
    for (uint32_t at = mxd_json_first(c->doc, node); at; at = mxd_json_next(c->doc, node, at)) {
        size_t i = 0, known = sizeof KEYWORDS / sizeof *KEYWORDS;
        while (i < known && !mxd_json_equals(c->doc, at, KEYWORDS[i].name)) i++;
        if (i == known) {
            refuse(c, "is not supported", mxd_json_text(c->doc, at, NULL));
            return false;
        }
        if (mxd_json_get(c->doc, node, KEYWORDS[i].name) == at + 1) count[KEYWORDS[i].group]++;
    }
    return true;
}

/* Read a count such as "minItems"; `otherwise` if it is not there. */
static uint32_t read_count(compiler *c, uint32_t node, const char *name, uint32_t otherwise) {
    uint32_t at = mxd_json_get(c->doc, node, name);
    int64_t value;
    if (!at) return otherwise;
    if (mxd_json_integer(c->doc, at, &value) && value >= 0 && value <= MAX_COUNT) return (uint32_t)value;
    refuse(c, "is not a whole number from 0 to 4096", name);
    return otherwise;
}

/* ---- references ---- */

/* Go one step of a JSON pointer down; 0: there is no such member. */
static uint32_t step_down(const mxd_json *doc, uint32_t node, const char *step, size_t len) {
    char name[256];
    size_t n = 0;
    if (len >= sizeof name) return 0;
    for (size_t i = 0; i < len; i++) {
        bool escaped = step[i] == '~' && i + 1 < len && (step[i + 1] == '0' || step[i + 1] == '1');
        name[n++] = !escaped ? step[i] : step[++i] == '0' ? '~' : '/';
    }
    name[n] = 0;
    return mxd_json_get(doc, node, name);
}

/* Return the schema that "$ref" at `node` leads to; UINT32_MAX: none. */
static uint32_t follow(const compiler *c, uint32_t node) {
    uint32_t at = mxd_json_get(c->doc, node, "$ref"), found = c->root;
    if (!mxd_json_is(c->doc, at, MXD_JSON_STRING)) return UINT32_MAX;
    const char *p = mxd_json_text(c->doc, at, NULL);
    if (*p++ != '#') return UINT32_MAX;
    while (*p == '/') {
        size_t len = strcspn(++p, "/");
        if (!(found = step_down(c->doc, found, p, len))) return UINT32_MAX;
        p += len;
    }
    return *p ? UINT32_MAX : found;
}

static mxd_piece compile_reference(compiler *c, uint32_t node) {
    uint32_t to = follow(c, node);
    if (to == UINT32_MAX) return refuse(c, "leads to no part of this schema (such as #/$defs/NAME)", "$ref");
    bool again = c->active_count == MAX_REFERENCES;
    for (uint32_t i = 0; i < c->active_count; i++) again |= c->active[i] == to;
    if (again) return refuse(c, "leads back to itself: recursive schemas are not supported", "$ref");
    c->active[c->active_count++] = to;
    mxd_piece p = compile(c, to);
    c->active_count--;
    return p;
}

/* ---- choices ---- */

static mxd_piece compile_values(compiler *c, uint32_t node) {
    uint32_t list, types = mxd_schema_types(c->doc, node), count = 0;
    uint32_t values = mxd_json_get(c->doc, node, "enum");
    mxd_piece p = NOTHING;
    if (values && !mxd_json_is(c->doc, values, MXD_JSON_ARRAY)) return refuse(c, "is not an array", "enum");
    for (uint32_t at = mxd_schema_first_value(c->doc, node, &list); at; at = mxd_schema_next_value(c->doc, list, at)) {
        if (!(mxd_schema_types_of_value(c->doc, at) & types)) continue;
        mxd_piece value = mxd_piece_literal(c->n, c->doc, at);
        p = count++ ? mxd_piece_or(c->n, p, value) : value;
    }
    return count ? p : refuse(c, "allows no value of its type", list ? "enum" : "const");
}

/* Whether no value fits two schemas, so far as that is easily seen. */
static bool disjoint(const compiler *c, uint32_t a, uint32_t b) {
    if (mxd_json_get(c->doc, a, "$ref")) a = follow(c, a);
    if (mxd_json_get(c->doc, b, "$ref")) b = follow(c, b);
    return a != UINT32_MAX && b != UINT32_MAX && mxd_schema_disjoint(c->doc, a, b);
}

static mxd_piece compile_choice(compiler *c, uint32_t list, const char *name, bool exclusive) {
    mxd_piece p = NOTHING;
    uint32_t i = 0;
    if (!mxd_json_is(c->doc, list, MXD_JSON_ARRAY) || !mxd_json_first(c->doc, list))
        return refuse(c, "is not an array of schemas", name);
    if (c->doc->nodes[list].len > 256) return refuse(c, "has more than 256 schemas", name);
    for (uint32_t at = mxd_json_first(c->doc, list); at && !c->status; at = mxd_json_next(c->doc, list, at), i++) {
        for (uint32_t b = mxd_json_first(c->doc, list); exclusive && b != at; b = mxd_json_next(c->doc, list, b))
            if (!disjoint(c, at, b))
                return refuse(c, "may have values in common: use 'anyOf', or a required property with other values",
                              "oneOf");
        char index[16];
        snprintf(index, sizeof index, "%u", i);
        size_t before = enter(c, name, index);
        mxd_piece one = compile(c, at);
        p = i > 0 ? mxd_piece_or(c->n, p, one) : one;
        leave(c, before);
    }
    return p;
}

/* ---- objects, arrays ---- */

/* Check that "required" lists properties which have a schema. */
static bool check_required(compiler *c, uint32_t node, uint32_t properties) {
    uint32_t list = mxd_json_get(c->doc, node, "required");
    if (!list) return true;
    if (!mxd_json_is(c->doc, list, MXD_JSON_ARRAY)) refuse(c, "is not an array", "required");
    for (uint32_t at = mxd_json_first(c->doc, list); at && !c->status; at = mxd_json_next(c->doc, list, at))
        if (!mxd_json_is(c->doc, at, MXD_JSON_STRING)) refuse(c, "has an item that is not a string", "required");
        else if (!properties || !mxd_json_get(c->doc, properties, mxd_json_text(c->doc, at, NULL)))
            refuse(c, "is required, but not among 'properties',", mxd_json_text(c->doc, at, NULL));
    return !c->status;
}

/* Make the members of an object, in the order of "properties". `first` is where none is written yet, `later` where some
 * are; each property goes on from the first by its name, from the other by a comma before it. */
static mxd_piece compile_properties(compiler *c, uint32_t node, uint32_t properties) {
    mxd_nfa *n = c->n;
    uint32_t in = mxd_nfa_add(n), out = mxd_nfa_add(n), first = in, later = 0;
    for (uint32_t at = mxd_json_first(c->doc, properties); at && !c->status;
         at = mxd_json_next(c->doc, properties, at)) {
        size_t len;
        const char *name = mxd_json_text(c->doc, at, &len);
        if (strlen(name) != len) return refuse(c, "has a name with a NUL", "properties");
        if (mxd_json_get(c->doc, properties, name) != at + 1) continue; /* the last one counts */
        size_t before = enter(c, "properties", name);
        mxd_piece member = mxd_piece_then(n, mxd_piece_literal(n, c->doc, at), mxd_piece_text(n, ": "));
        member = mxd_piece_then(n, member, compile(c, at + 1));
        leave(c, before);
        uint32_t next = mxd_nfa_add(n); /* `later` after this property */
        mxd_nfa_link(n, member.out, next);
        if (first) mxd_nfa_link(n, first, member.in);
        if (later) {
            mxd_piece comma = mxd_piece_text(n, ", ");
            mxd_nfa_link(n, later, comma.in);
            mxd_nfa_link(n, comma.out, member.in);
        }
        if (mxd_schema_requires(c->doc, node, name)) first = 0;
        else if (later) mxd_nfa_link(n, later, next);
        later = next;
    }
    if (first) mxd_nfa_link(n, first, out);
    if (later) mxd_nfa_link(n, later, out);
    return (mxd_piece){in, out};
}

/* What the maker of repeated pieces needs to know. */
typedef struct inner {
    compiler *c;
    uint32_t node;
} inner;

static mxd_piece make_item(mxd_nfa *n, void *arg) {
    inner *i = arg;
    (void)n;
    return compile(i->c, i->node);
}

static mxd_piece make_member(mxd_nfa *n, void *arg) {
    mxd_piece name = mxd_piece_then(n, mxd_piece_string(n, 0, UINT32_MAX), mxd_piece_text(n, ": "));
    return mxd_piece_then(n, name, make_item(n, arg));
}

static mxd_piece in_brackets(mxd_nfa *n, const char *open, mxd_piece p, const char *close) {
    return mxd_piece_then(n, mxd_piece_then(n, mxd_piece_text(n, open), p), mxd_piece_text(n, close));
}

static mxd_piece compile_object(compiler *c, uint32_t node) {
    uint32_t properties = mxd_json_get(c->doc, node, "properties");
    uint32_t more = mxd_json_get(c->doc, node, "additionalProperties");
    if (properties && !mxd_json_is(c->doc, properties, MXD_JSON_OBJECT))
        return refuse(c, "is not an object", "properties");
    if (properties && !mxd_json_first(c->doc, properties)) properties = 0;
    if (!check_required(c, node, properties)) return NOTHING;
    bool with_schema = more && mxd_json_is(c->doc, more, MXD_JSON_OBJECT);
    if (properties && with_schema)
        return refuse(c, "with a schema is supported only without 'properties'", "additionalProperties");
    if (properties) return in_brackets(c->n, "{", compile_properties(c, node, properties), "}");
    if (with_schema) {
        size_t before = enter(c, "additionalProperties", NULL);
        inner value = {c, more};
        mxd_piece p = mxd_piece_times(c->n, make_member, &value, ", ", 0, UINT32_MAX);
        leave(c, before);
        return in_brackets(c->n, "{", p, "}");
    }
    if (more && mxd_json_is(c->doc, more, MXD_JSON_FALSE)) return mxd_piece_text(c->n, "{}");
    if (more && !mxd_json_is(c->doc, more, MXD_JSON_TRUE)) return refuse(c, "is no schema", "additionalProperties");
    return mxd_piece_any_object(c->n, OPEN_DEPTH);
}

static mxd_piece compile_array(compiler *c, uint32_t node) {
    uint32_t items = mxd_json_get(c->doc, node, "items");
    uint32_t min = read_count(c, node, "minItems", 0), max = read_count(c, node, "maxItems", UINT32_MAX);
    if (min > max) return refuse(c, "is more than 'maxItems'", "minItems");
    if (!items) return mxd_piece_any_array(c->n, OPEN_DEPTH, min, max);
    size_t before = enter(c, "items", NULL);
    inner item = {c, items};
    mxd_piece p = mxd_piece_times(c->n, make_item, &item, ", ", min, max);
    leave(c, before);
    return in_brackets(c->n, "[", p, "]");
}

static mxd_piece compile_string(compiler *c, uint32_t node) {
    uint32_t min = read_count(c, node, "minLength", 0), max = read_count(c, node, "maxLength", UINT32_MAX);
    if (min > max) return refuse(c, "is more than 'maxLength'", "minLength");
    return mxd_piece_string(c->n, min, max);
}

/* ---- schemas ---- */

static mxd_piece compile_type(compiler *c, uint32_t node, uint32_t bit) {
    switch (bit) {
    case NULL_BIT: return mxd_piece_text(c->n, "null");
    case BOOLEAN_BIT: return mxd_piece_or(c->n, mxd_piece_text(c->n, "true"), mxd_piece_text(c->n, "false"));
    case INTEGER_BIT:
    case NUMBER_BIT: return mxd_piece_number(c->n, bit == INTEGER_BIT);
    case STRING_BIT: return compile_string(c, node);
    case ARRAY_BIT: return compile_array(c, node);
    default: return compile_object(c, node);
    }
}

/* Compile a schema that says which types its values have, or whose keywords are for some of them. */
static mxd_piece compile_types(compiler *c, uint32_t node, const uint32_t count[GROUPS]) {
    uint32_t types = mxd_schema_types(c->doc, node);
    if (!types) return refuse(c, "is none of the types of JSON, nor a list of them", "type");
    if (!count[TYPE] && !count[OBJECT] && !count[ARRAY] && !count[STRING]) return mxd_piece_any(c->n, OPEN_DEPTH);
    if (!count[TYPE])
        types = (count[OBJECT] ? OBJECT_BIT : 0u) | (count[ARRAY] ? ARRAY_BIT : 0u) | (count[STRING] ? STRING_BIT : 0u);
    if (types & NUMBER_BIT) types &= ~(uint32_t)INTEGER_BIT;
    mxd_piece p = NOTHING;
    bool some = false;
    for (uint32_t bit = 1; bit <= OBJECT_BIT; bit <<= 1) {
        if (!(types & bit)) continue;
        mxd_piece one = compile_type(c, node, bit);
        p = some ? mxd_piece_or(c->n, p, one) : one;
        some = true;
    }
    return p;
}

/* Compile the schema at `node`. After a refusal or failure the piece means nothing. */
static mxd_piece compile(compiler *c, uint32_t node) {
    uint32_t count[GROUPS], others = 0;
    if (c->status || c->n->failed) return NOTHING;
    if (mxd_json_is(c->doc, node, MXD_JSON_TRUE)) return mxd_piece_any(c->n, OPEN_DEPTH);
    if (!mxd_json_is(c->doc, node, MXD_JSON_OBJECT)) return refuse(c, "not a schema", NULL);
    if (!count_keywords(c, node, count)) return NOTHING;
    for (uint32_t group = OBJECT; group < GROUPS; group++) others += count[group];
    if (count[VALUES] + count[CHOICE] > 1 || (count[VALUES] && others) || (count[CHOICE] && (others || count[TYPE])))
        return refuse(c, "enum, const, anyOf, oneOf and $ref stand alone, but for a type next to enum or const", NULL);
    if (count[VALUES]) return compile_values(c, node);
    if (mxd_json_get(c->doc, node, "$ref")) return compile_reference(c, node);
    uint32_t any = mxd_json_get(c->doc, node, "anyOf"), one = mxd_json_get(c->doc, node, "oneOf");
    if (any) return compile_choice(c, any, "anyOf", false);
    if (one) return compile_choice(c, one, "oneOf", true);
    return compile_types(c, node, count);
}

mxd_status mxd_schema_piece(mxd_nfa *nfa, const mxd_json *doc, uint32_t node, mxd_piece *out, mxd_error *err) {
    compiler c = {.n = nfa, .doc = doc, .root = node, .err = err};
    *out = compile(&c, node);
    return c.status;
}
