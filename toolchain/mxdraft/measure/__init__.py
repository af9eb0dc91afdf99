# SPDX-License-Identifier: Apache-2.0
"""Measurements: bundles against their weights, drafters against their target, drafting against none.

prompts.py      questions to measure with
quality.py      KL divergence, top-1 agreement and perplexity against a teacher
sensitivity.py  which weights suffer from MXFP4
draft_table.py  what a drafter would propose, everywhere in finished texts
acceptance.py   how much of that its target accepts
speculation.py  what drafting buys in speed
origin/         what core tokens are and buy
logistic.py     logistic regression, and how well scores tell two classes apart
plot.py         drawings of the results
"""
