/* SPDX-License-Identifier: Apache-2.0 */
/* Damages tokenizer and chat sections and uses what is still accepted: text_sections TOKENIZER CHAT VOCAB ROUNDS.
 * Built with the address and undefined-behaviour sanitizers, which end it at the first wrong access. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../runtime/src/chat.h"

static uint64_t state = 1;

static size_t pick(size_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (size_t)(state % n);
}

static uint8_t *read_file(const char *path, size_t *len) {
    FILE *file = fopen(path, "rb");
    if (!file) exit(2);
    uint8_t *data = malloc(1 << 20);
    *len = fread(data, 1, 1 << 20, file);
    fclose(file);
    return data;
}

/* A copy of exactly its size, so that the first byte after it is poisoned. */
static uint8_t *damaged(const uint8_t *data, size_t *len) {
    if (pick(8) == 0) *len = pick(*len);
    uint8_t *copy = malloc(*len + 1);
    copy = realloc(copy, *len ? *len : 1);
    memcpy(copy, data, *len);
    for (size_t flips = pick(4); flips > 0 && *len; flips--) {
        /* Half of them in the header and what follows it, where the counts are. */
        size_t at = pick(pick(2) ? *len : (*len < 64 ? *len : 64));
        copy[at] = pick(2) ? (uint8_t)pick(256) : (uint8_t)(copy[at] ^ 1u << pick(8));
    }
    return copy;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    size_t tokenizer_len, chat_len;
    uint8_t *tokenizer_file = read_file(argv[1], &tokenizer_len), *chat_file = read_file(argv[2], &chat_len);
    uint32_t vocab = (uint32_t)atoi(argv[3]);
    static const char TEXT[] = "The boat's 12 \n\n words, it said \xE6\xBC\xA2 \xFF\xF0\x9F <|im_end|> there   ";
    const mxd_message messages[] = {{"user", TEXT}, {"assistant", "\n"}, {"user", ""}};
    int tokenizers = 0, chats = 0;

    for (int rounds = atoi(argv[4]); rounds > 0; rounds--) {
        size_t len = tokenizer_len;
        uint8_t *tokenizer_data = damaged(tokenizer_file, &len);
        mxd_tokenizer tokenizer;
        mxd_error err;
        uint32_t ids[512];
        size_t n;
        if (!mxd_tokenizer_init(&tokenizer, tokenizer_data, len, vocab, &err)) {
            tokenizers++;
            if (mxd_tokenizer_encode(&tokenizer, TEXT, sizeof TEXT - 1, ids, 512, &n, &err)) return 1;
            for (size_t i = tokenizer.adds_bos; i < n; i++)
                if (ids[i] >= vocab || mxd_tokenizer_is_special(&tokenizer, ids[i])) return 1;
            for (uint32_t id = 0; id < vocab; id++) {
                size_t bytes;
                const char *text = mxd_tokenizer_bytes(&tokenizer, id, &bytes);
                for (size_t i = 0; i < bytes; i++) state ^= (uint8_t)text[i];
            }
            len = chat_len;
            uint8_t *chat_data = damaged(chat_file, &len);
            mxd_chat chat;
            if (!mxd_chat_init(&chat, chat_data, len, vocab, &err)) {
                chats++;
                if (!mxd_chat_encode_messages(&chat, &tokenizer, messages, 3, 1, ids, 512, &n, &err))
                    for (size_t i = 0; i < n; i++)
                        if (ids[i] >= vocab) return 1;
            }
            free(chat_data);
        }
        free(tokenizer_data);
    }
    free(tokenizer_file);
    free(chat_file);
    printf("%d %d\n", tokenizers, chats);
    return 0;
}
