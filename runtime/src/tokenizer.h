/* SPDX-License-Identifier: Apache-2.0 */
/* BPE over the bundle's `tokenizer` section (runtime/BUNDLE.md), read in place. Its ids are those of Hugging
 * Face `tokenizers`. */
#ifndef MXD_TOKENIZER_H
#define MXD_TOKENIZER_H

#include <stdbool.h>

#include "pretoken.h"
#include "status.h"

#define MXD_NO_TOKEN UINT32_MAX
#define MXD_MAX_TOKEN_BYTES 1024

/* A validated view: pointers into the section. */
typedef struct mxd_tokenizer {
    uint32_t vocab, merge_count, special_count, eos_count, text_bytes, added_count, by_text_count;
    uint32_t bos; /* MXD_NO_TOKEN: none */
    mxd_pre_tokenizer pre_tokenizer;
    bool whole_words;           /* a pre-token that is a token is not merged */
    bool nfc;                   /* text is brought to form C first */
    bool adds_bos;              /* a text begins with bos */
    const uint32_t *byte_token; /* (256) id of the token that is this byte, or MXD_NO_TOKEN */
    const uint32_t *eos;        /* (eos_count) ascending */
    const uint32_t *special;    /* (special_count) ascending */
    const uint32_t *text_start; /* (vocab + 1) where each token's bytes begin in text */
    const uint32_t *merge;      /* (merge_count, 3) in order of rank: left, right, result */
    const uint32_t *by_pair;    /* (merge_count) ranks in order of (left, right) */
    const uint32_t *added;      /* (added_count) tokens cut out of texts, and control tokens, in order of their bytes */
    const uint32_t *by_text;    /* (by_text_count) plain tokens in order of their bytes: words or characters */
    const uint8_t *text;
} mxd_tokenizer;

/* A list of ids under work: n counts all of them, also those beyond cap. */
typedef struct mxd_id_buffer {
    uint32_t *ids;
    size_t cap, n;
} mxd_id_buffer;

/* Validate section[len] for a model of `vocab` tokens: MXD_BAD_TOKENIZER says which check failed. The section must
 * be 4-byte aligned (bundle sections are) and outlive t. */
mxd_status mxd_tokenizer_init(mxd_tokenizer *t, const uint8_t *section, size_t len, uint32_t vocab, mxd_error *err);

/* Encode text[len]: mxd_encode() of the public header. O(len log len). Allocates only for pre-tokens (roughly: words;
 * the whole text where spaces are marked) of more than 256 bytes, 20 bytes a byte, and to normalize, 17 bytes a byte;
 * freed on return. */
mxd_status mxd_tokenizer_encode(const mxd_tokenizer *t, const char *text, size_t len, uint32_t *ids, size_t cap,
                                size_t *n, mxd_error *err);

/* Append the ids of a text to a buffer; a full buffer is no error here. */
mxd_status mxd_tokenizer_append(const mxd_tokenizer *t, const uint8_t *text, size_t len, mxd_id_buffer *out,
                                mxd_error *err);
void mxd_id_buffer_push(mxd_id_buffer *out, uint32_t id);
/* Set *n to the count; MXD_ERR_BUFFER if it exceeds the capacity. */
mxd_status mxd_id_buffer_finish(const mxd_id_buffer *out, size_t *n, mxd_error *err);

/* Return the bytes of a token: mxd_token_bytes() of the public header; at most MXD_MAX_TOKEN_BYTES. */
const char *mxd_tokenizer_bytes(const mxd_tokenizer *t, uint32_t id, size_t *len);
bool mxd_tokenizer_is_special(const mxd_tokenizer *t, uint32_t id);
bool mxd_tokenizer_is_eos(const mxd_tokenizer *t, uint32_t id);

/* Return the plain token that is bytes[len], of those in by_text; MXD_NO_TOKEN if there is none. */
uint32_t mxd_tokenizer_find_text(const mxd_tokenizer *t, const uint8_t *bytes, size_t len);
/* Return the rank of the merge of two tokens; MXD_NO_TOKEN if there is none. */
uint32_t mxd_tokenizer_find_merge(const mxd_tokenizer *t, uint32_t left, uint32_t right);

/* Whether ids[count] ascend and are below `vocab`; whether ascending ids contain one. */
bool mxd_ids_ascend(const uint32_t *ids, uint32_t count, uint32_t vocab);
bool mxd_ids_contain(const uint32_t *ids, uint32_t count, uint32_t id);

#endif
