# SPDX-License-Identifier: Apache-2.0
"""Stands in for llama-cpp-python's low-level bindings: a "model" whose next token follows from the last two.

A position that is not the next of its sequence is a failed decode, as in a cache that was not truncated.
"""

import ctypes
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.0-fake"
LLAMA_FTYPE_MOSTLY_Q4_0, LLAMA_FTYPE_MOSTLY_Q8_0 = 2, 7
VOCAB, END = 97, 96


def llama_log_callback(function):
    return function


def llama_log_set(callback, data):
    assert data is None
    callback(2, b"chatter", None)
    callback(3, b"warning\n", None)


def llama_backend_init():
    print("llama.cpp prints what it likes")


def llama_print_system_info():
    return b"FAKE = 1"


def llama_model_quantize_default_params():
    return ctypes.c_int(0)


def llama_model_quantize(source, target, params):
    data = Path(source.decode()).read_bytes()
    if data.startswith(b"broken"):
        raise RuntimeError("not a GGUF file")
    parts = {LLAMA_FTYPE_MOSTLY_Q4_0: 2, LLAMA_FTYPE_MOSTLY_Q8_0: 1}[params._obj.ftype]
    Path(target.decode()).write_bytes(data[: len(data) // parts])
    return 0


def llama_model_default_params():
    return None


def llama_model_load_from_file(path, params):  # noqa: ARG001
    return path


def llama_model_get_vocab(model):
    return model


def llama_vocab_n_tokens(vocabulary):  # noqa: ARG001
    return VOCAB


def llama_vocab_is_eog(vocabulary, token):  # noqa: ARG001
    return token == END


def llama_context_default_params():
    return SimpleNamespace()


def llama_init_from_model(model, params):  # noqa: ARG001
    return SimpleNamespace(cache={s: [] for s in range(params.n_seq_max)}, logits=[], params=params)


def llama_get_memory(context):
    return context


def llama_memory_seq_rm(context, sequence, first, last):
    assert last == -1
    del context.cache[sequence][first:]
    return True


def llama_batch_init(rows, embeddings, sequences):
    assert (embeddings, sequences) == (0, 1)
    names = ("token", "pos", "n_seq_id", "logits")
    return SimpleNamespace(
        n_tokens=0, seq_id=[[0] for _ in range(rows)], **{name: [0] * rows for name in names}
    )


def llama_decode(context, batch):
    context.logits = []
    for i in range(batch.n_tokens):
        known = context.cache[batch.seq_id[i][0]]
        if batch.pos[i] != len(known) or batch.n_seq_id[i] != 1:
            return 1
        known.append(batch.token[i])
        row = (ctypes.c_float * VOCAB)()
        row[_next(known)] = 1.0
        context.logits.append(row if batch.logits[i] else None)
    return 0


def _next(known):
    """Runs of seven that repeat, with a number between them that does not: drafts are partly right."""
    return len(known) // 8 % 50 + 40 if len(known) % 8 == 0 else len(known) % 8


def llama_synchronize(context):
    assert len(context.logits) > 0


def llama_get_logits_ith(context, row):
    return ctypes.cast(context.logits[row], ctypes.POINTER(ctypes.c_float))
