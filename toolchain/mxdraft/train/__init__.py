# SPDX-License-Identifier: Apache-2.0
"""Training: what it reads, what it does, what it leaves.

corpus.py       text that a bundle writes itself (``mxdraft train text``)
recipe.py       the settings of a training, from TOML
data.py         teacher text as windows, and the teacher's states
fakequant.py    MXFP4 and int8 with straight-through gradients
model.py        a Llama whose layers read their weights through MXFP4
start.py        where training starts: rounded, or error-compensated (GPTQ)
loss.py         the distance between student and teacher
run.py          what every training has in common: checkpoints, log, exact resume
target.py       QAT of a target (``mxdraft train target``)
delta.py        its result: a base plane as a difference from the checkpoint
features.py     what a frozen target knows at each position of a text
draft_model.py  the drafter in torch
draft_train.py  training of a drafter (``mxdraft train drafter``)
cotrain.py      drafter and target in training together
drafter.py      the result: a drafter, its file, its sections of a bundle

corpus.py, delta.py and drafter.py need no torch; the others are of the extra ``mxdraft[train]``.
"""
