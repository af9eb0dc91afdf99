/* SPDX-License-Identifier: Apache-2.0 */
/* The chat template as pieces, from the bundle's `chat` section (runtime/BUNDLE.md), read in place. */
#ifndef MXD_CHAT_H
#define MXD_CHAT_H

#include "tokenizer.h"

#define MXD_ROLE_BYTES 16

/* What a template asks for beyond pieces (BUNDLE.md). */
enum {
    MXD_CHAT_FOLDS_SYSTEM = 1 << 16,
    MXD_CHAT_SYSTEM_FIRST = 1 << 17,
    MXD_CHAT_ALTERNATES = 1 << 18,
    MXD_CHAT_CUTS_THOUGHTS = 1 << 19,
    MXD_CHAT_ASKS = 1 << 20
};

/* A validated view: pointers into the section. */
typedef struct mxd_chat {
    uint32_t role_count, segment_count, text_bytes;
    uint32_t rules;                     /* bit i: contents of role i are trimmed; MXD_CHAT_... */
    const char (*role)[MXD_ROLE_BYTES]; /* (role_count) NUL-terminated names */
    const uint32_t *piece_end;          /* (3 + 2 role_count) index after the last segment of each piece */
    const uint32_t *segment;            /* (segment_count, 2) token id, or MXD_NO_TOKEN for text; end of its text */
    const uint8_t *text;
} mxd_chat;

/* Validate section[len] for a vocabulary of `vocab` tokens: MXD_BAD_CHAT says which check failed. The section must be
 * 4-byte aligned (bundle sections are) and outlive c. */
mxd_status mxd_chat_init(mxd_chat *c, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err);

/* Encode a conversation: mxd_chat_encode() of the public header. What lies between two control tokens of the template
 * is encoded as one text, as if the whole conversation had been written out first, but control-token text in a message
 * stays text. Allocates one buffer of the conversation's size, freed on return. MXD_ERR_ARGUMENT: no message, a role
 * that the template does not have (the error names those it has), or an order of roles that it does not take. */
mxd_status mxd_chat_encode_messages(const mxd_chat *c, const mxd_tokenizer *t, const mxd_message *messages,
                                    size_t count, int add_generation, uint32_t *ids, size_t cap, size_t *n,
                                    mxd_error *err);

#endif
