/* Text functions of the public header, on a model's tokenizer and chat template. */
#include "bundle.h"

mxd_status mxd_encode(const mxd_model *m, const char *text, size_t len, uint32_t *ids, size_t cap, size_t *n,
                      mxd_error *err) {
    return mxd_tokenizer_encode(&m->tokenizer, text, len, ids, cap, n, err);
}

const char *mxd_token_bytes(const mxd_model *m, uint32_t id, size_t *len) {
    if (id >= m->config.vocab) {
        *len = 0;
        return NULL;
    }
    return mxd_tokenizer_bytes(&m->tokenizer, id, len);
}

int mxd_token_is_special(const mxd_model *m, uint32_t id) {
    return id < m->config.vocab && mxd_tokenizer_is_special(&m->tokenizer, id);
}

mxd_status mxd_chat_encode(const mxd_model *m, const mxd_message *messages, size_t count, int add_generation,
                           uint32_t *ids, size_t cap, size_t *n, mxd_error *err) {
    if (!m->has_chat)
        return mxd_fail(err, MXD_ERR_UNSUPPORTED, "%s has no chat template: use the raw prompt", m->path);
    return mxd_chat_encode_messages(&m->chat, &m->tokenizer, messages, count, add_generation, ids, cap, n, err);
}
