/* SPDX-License-Identifier: Apache-2.0 */
/* Unicode's normalization form C, as Hugging Face's `tokenizers` make it. */
#ifndef MXD_NFC_H
#define MXD_NFC_H

#include <stdbool.h>

#include "status.h"

/* Whether text[len] may differ from its form C: false for what is all below U+0300. */
bool mxd_nfc_may_change(const uint8_t *text, size_t len);

/* Set *out to form C of text[len], *out_len bytes, which the caller frees. Bytes that are not UTF-8 stay, and stand apart
 * from what surrounds them. O(len). MXD_ERR_MEMORY. */
mxd_status mxd_nfc(const uint8_t *text, size_t len, uint8_t **out, size_t *out_len, mxd_error *err);

#endif
