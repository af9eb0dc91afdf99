/* SPDX-License-Identifier: Apache-2.0 */
#include "chat.h"

#include <stdlib.h>
#include <string.h>

#include "utf8.h"

enum { HEADER_BYTES = 16, MAX_ROLES = 16, MAX_SEGMENTS = 1 << 16, MAX_TEXT = 1 << 20 };

/* Pieces in the order of the section; then prefix and suffix of each role. */
enum { PIECE_OPENING, PIECE_DEFAULT_SYSTEM, PIECE_GENERATION, PIECE_ROLES };

/* ---- the section ---- */

static mxd_status refuse(mxd_error *err, const char *what) {
    return mxd_fail(err, MXD_BAD_CHAT, "chat: %s: pack the bundle again", what);
}

/* Whether a name is [a-z_]+, NUL-padded, with at least one NUL. */
static bool valid_role(const char *name) {
    size_t n = 0;
    while (n < MXD_ROLE_BYTES && ((name[n] >= 'a' && name[n] <= 'z') || name[n] == '_')) n++;
    if (n == 0 || n == MXD_ROLE_BYTES) return false;
    for (size_t i = n; i < MXD_ROLE_BYTES; i++)
        if (name[i]) return false;
    return true;
}

static bool valid_text(const uint8_t *text, size_t len) {
    uint32_t c;
    for (size_t pos = 0, width; pos < len; pos += width)
        if (!(width = mxd_utf8_decode(text + pos, len - pos, &c))) return false;
    return true;
}

static const uint32_t *segment_at(const mxd_chat *c, uint32_t i) {
    return c->segment + 2 * (size_t)i;
}

static bool has_role(const mxd_chat *c, const char *name) {
    for (uint32_t i = 0; i < c->role_count; i++)
        if (!strcmp(c->role[i], name)) return true;
    return false;
}

static mxd_status check_roles(const mxd_chat *c, mxd_error *err) {
    for (uint32_t i = 0; i < c->role_count; i++) {
        if (!valid_role(c->role[i])) return refuse(err, "bad role name");
        for (uint32_t j = 0; j < i; j++)
            if (!strcmp(c->role[i], c->role[j])) return refuse(err, "a role appears twice");
    }
    if ((c->rules & MXD_CHAT_FOLDS_SYSTEM) &&
        (!(c->rules & MXD_CHAT_SYSTEM_FIRST) || !has_role(c, "system") || !has_role(c, "user")))
        return refuse(err, "there is no system message to fold");
    return MXD_OK;
}

static mxd_status check_pieces(const mxd_chat *c, uint32_t vocab, mxd_error *err) {
    uint32_t end = 0;
    for (uint32_t i = 0; i < PIECE_ROLES + 2 * c->role_count; i++) {
        if (c->piece_end[i] < end || c->piece_end[i] > c->segment_count) return refuse(err, "bad pieces");
        end = c->piece_end[i];
    }
    if (end != c->segment_count) return refuse(err, "bad pieces");

    end = 0;
    for (uint32_t i = 0; i < c->segment_count; i++) {
        uint32_t id = segment_at(c, i)[0], start = end;
        end = segment_at(c, i)[1];
        if (end < start || end > c->text_bytes) return refuse(err, "bad segment");
        if (id == MXD_NO_TOKEN ? end == start || !valid_text(c->text + start, end - start)
                               : end != start || id >= vocab)
            return refuse(err, "bad segment");
    }
    return end == c->text_bytes ? MXD_OK : refuse(err, "bad segment");
}

mxd_status mxd_chat_init(mxd_chat *c, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err) {
    if (len < HEADER_BYTES) return refuse(err, "shorter than its header");
    const uint32_t *header = (const uint32_t *)(const void *)section;
    *c = (mxd_chat){.role_count = header[0], .segment_count = header[1], .text_bytes = header[2], .rules = header[3]};
    if (c->role_count < 1 || c->role_count > MAX_ROLES || c->segment_count > MAX_SEGMENTS || c->text_bytes > MAX_TEXT)
        return refuse(err, "impossible count");
    uint32_t flags = MXD_CHAT_FOLDS_SYSTEM | MXD_CHAT_SYSTEM_FIRST | MXD_CHAT_ALTERNATES | MXD_CHAT_CUTS_THOUGHTS |
                     MXD_CHAT_ASKS;
    if (c->rules & ~(flags | ((1u << c->role_count) - 1))) return refuse(err, "unknown rules");
    size_t pieces = PIECE_ROLES + 2 * (size_t)c->role_count;
    size_t fixed = HEADER_BYTES + MXD_ROLE_BYTES * (size_t)c->role_count + 4 * pieces + 8 * (size_t)c->segment_count;
    if (len != fixed + c->text_bytes) return refuse(err, "length differs from what its counts ask for");
    c->role = (const char (*)[MXD_ROLE_BYTES])(const void *)(section + HEADER_BYTES);
    c->piece_end = (const uint32_t *)(const void *)(c->role + c->role_count);
    c->segment = c->piece_end + pieces;
    c->text = section + fixed;
    mxd_status status = check_roles(c, err);
    return status ? status : check_pieces(c, vocab, err);
}

/* ---- conversations ---- */

/* What was written of a conversation: its ids, and text that waits for the next control token to be encoded as a
 * whole. */
typedef struct writer {
    const mxd_chat *chat;
    const mxd_tokenizer *tokenizer;
    uint8_t *text;
    size_t len;
    mxd_id_buffer out;
} writer;

static void write_text(writer *w, const void *text, size_t len) {
    memcpy(w->text + w->len, text, len);
    w->len += len;
}

static mxd_status encode_text(writer *w, mxd_error *err) {
    size_t len = w->len;
    w->len = 0;
    return mxd_tokenizer_append(w->tokenizer, w->text, len, &w->out, err);
}

static mxd_status write_piece(writer *w, uint32_t piece, mxd_error *err) {
    const mxd_chat *c = w->chat;
    for (uint32_t i = piece ? c->piece_end[piece - 1] : 0; i < c->piece_end[piece]; i++) {
        uint32_t id = segment_at(c, i)[0], start = i ? segment_at(c, i - 1)[1] : 0;
        if (id == MXD_NO_TOKEN) {
            write_text(w, c->text + start, segment_at(c, i)[1] - start);
            continue;
        }
        mxd_status status = encode_text(w, err);
        if (status) return status;
        mxd_id_buffer_push(&w->out, id);
    }
    return MXD_OK;
}

static mxd_status find_role(const mxd_chat *c, const char *name, uint32_t *role, mxd_error *err) {
    for (*role = 0; *role < c->role_count; ++*role)
        if (!strcmp(c->role[*role], name)) return MXD_OK;
    char known[MAX_ROLES * (MXD_ROLE_BYTES + 2)] = "";
    for (uint32_t i = 0; i < c->role_count; i++) {
        if (i) strcat(known, ", ");
        strcat(known, c->role[i]);
    }
    return mxd_fail(err, MXD_ERR_ARGUMENT, "unknown role '%.32s': the chat template has %s", name, known);
}

/* Return the length of the white space that text[len] begins with, as Python's str.strip() has it; from_end: ends. */
static size_t space_width(const uint8_t *text, size_t len, bool from_end) {
    for (size_t width = 1; width <= 3 && width <= len; width++) {
        uint32_t c;
        if (mxd_utf8_decode(from_end ? text + len - width : text, width, &c) != width) continue;
        if ((c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
            (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000)
            return width;
    }
    return 0;
}

/* Return what follows the last end of a thought and its line feeds: all if there is none. */
static const char *after_thoughts(const char *text) {
    static const char END[] = "</think>";
    const char *found = NULL;
    for (const char *at = text; (at = strstr(at, END)); at += sizeof END - 1) found = at;
    return found ? found + sizeof END - 1 + strspn(found + sizeof END - 1, "\n") : text;
}

static void write_content(writer *w, uint32_t role, const char *content) {
    const mxd_chat *c = w->chat;
    if ((c->rules & MXD_CHAT_CUTS_THOUGHTS) && !strcmp(c->role[role], "assistant")) content = after_thoughts(content);
    const uint8_t *text = (const uint8_t *)content;
    size_t len = strlen(content);
    if (c->rules >> role & 1) {
        for (size_t width; (width = space_width(text, len, false)); len -= width) text += width;
        for (size_t width; (width = space_width(text, len, true));) len -= width;
    }
    write_text(w, text, len);
}

/* Refuse an order of roles that the template refuses, or writes in a way that pieces and rules do not say. */
static mxd_status check_order(const mxd_chat *c, const mxd_message *messages, size_t count, int add_generation,
                              mxd_error *err) {
    bool led = (c->rules & MXD_CHAT_SYSTEM_FIRST) && !strcmp(messages[0].role, "system");
    for (size_t i = led; i < count; i++) {
        bool user = !strcmp(messages[i].role, "user");
        if ((c->rules & MXD_CHAT_SYSTEM_FIRST) && !strcmp(messages[i].role, "system"))
            return mxd_fail(err, MXD_ERR_ARGUMENT, "this chat template takes a system message in front only");
        if ((c->rules & MXD_CHAT_ALTERNATES) && user != ((i - led) % 2 == 0))
            return mxd_fail(err, MXD_ERR_ARGUMENT, "this chat template takes user and assistant in turns only");
        if ((c->rules & MXD_CHAT_FOLDS_SYSTEM) && led && i == 1 && !user)
            return mxd_fail(err, MXD_ERR_ARGUMENT, "this chat template takes a user's message after a system message");
    }
    if ((c->rules & (MXD_CHAT_FOLDS_SYSTEM | MXD_CHAT_ALTERNATES)) && count == (size_t)led)
        return mxd_fail(err, MXD_ERR_ARGUMENT, "this chat template takes a user's message after a system message");
    if ((c->rules & MXD_CHAT_ASKS) && (!add_generation || strcmp(messages[count - 1].role, "user")))
        return mxd_fail(err, MXD_ERR_ARGUMENT, "this chat template takes conversations that end with the user only");
    return MXD_OK;
}

/* Write a message; one that was folded, if any, comes between its prefix and its content. */
static mxd_status write_message(writer *w, const mxd_message *message, const mxd_message *folded, mxd_error *err) {
    uint32_t role;
    mxd_status status = find_role(w->chat, message->role, &role, err);
    if (!status) status = write_piece(w, PIECE_ROLES + 2 * role, err);
    if (!status && folded) status = write_message(w, folded, NULL, err);
    if (status) return status;
    write_content(w, role, message->content);
    return write_piece(w, PIECE_ROLES + 2 * role + 1, err);
}

static mxd_status write_conversation(writer *w, const mxd_message *messages, size_t count, int add_generation,
                                     mxd_error *err) {
    bool led = !strcmp(messages[0].role, "system"), folds = led && (w->chat->rules & MXD_CHAT_FOLDS_SYSTEM);
    uint32_t role;
    mxd_status status = MXD_OK;
    for (size_t i = 0; !status && i < count; i++) status = find_role(w->chat, messages[i].role, &role, err);
    if (!status) status = check_order(w->chat, messages, count, add_generation, err);
    if (!status) status = write_piece(w, PIECE_OPENING, err);
    if (!status && !led) status = write_piece(w, PIECE_DEFAULT_SYSTEM, err);
    for (size_t i = folds; !status && i < count; i++)
        status = write_message(w, &messages[i], folds && i == 1 ? &messages[0] : NULL, err);
    if (!status && add_generation) status = write_piece(w, PIECE_GENERATION, err);
    return status ? status : encode_text(w, err);
}

mxd_status mxd_chat_encode_messages(const mxd_chat *c, const mxd_tokenizer *t, const mxd_message *messages,
                                    size_t count, int add_generation, uint32_t *ids, size_t cap, size_t *n,
                                    mxd_error *err) {
    *n = 0;
    if (count == 0) return mxd_fail(err, MXD_ERR_ARGUMENT, "a conversation needs at least one message");
    /* Each message brings one prefix and one suffix; what precedes and follows all of them comes once. */
    size_t room = c->text_bytes;
    for (size_t i = 0; i < count; i++) room += c->text_bytes + strlen(messages[i].content);
    writer w = {.chat = c, .tokenizer = t, .text = malloc(room + 1), .out = {ids, cap, 0}};
    if (!w.text) return mxd_fail(err, MXD_ERR_MEMORY, "out of memory encoding a conversation of %zu bytes", room);
    mxd_status status = write_conversation(&w, messages, count, add_generation, err);
    free(w.text);
    return status ? status : mxd_id_buffer_finish(&w.out, n, err);
}
