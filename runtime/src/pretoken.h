/* SPDX-License-Identifier: Apache-2.0 */
/* Where text is cut before byte pairs are merged, as Hugging Face's `tokenizers` cut it. */
#ifndef MXD_PRETOKEN_H
#define MXD_PRETOKEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The codes of the bundle. The last three do not cut: they write a space as a mark of its own, and differ in the space
 * before a text (none, before each stretch of text, before the first that begins with none). */
typedef enum mxd_pre_tokenizer {
    MXD_PRE_GPT2 = 1,
    MXD_PRE_SMOLLM = 2, /* every numeric character is a pre-token of its own */
    MXD_PRE_LLAMA3 = 3,
    MXD_PRE_QWEN2 = 4,
    MXD_PRE_SPACES = 5,
    MXD_PRE_SPACES_PREFIX = 6,
    MXD_PRE_SPACES_FIRST = 7
} mxd_pre_tokenizer;

#define MXD_SPACE_MARK 0x2581 /* SentencePiece's sign for a space */

/* Whether a kind writes spaces as marks (and cuts nothing). */
bool mxd_marks_spaces(mxd_pre_tokenizer kind);

/* Return the end of the pre-token that begins at pos < len of text[len]; for kinds that do not mark spaces. A byte that
 * is not UTF-8 is one character that is no letter, number or space. */
size_t mxd_pre_token_end(mxd_pre_tokenizer kind, const uint8_t *text, size_t len, size_t pos);

#endif
