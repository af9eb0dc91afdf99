# SPDX-License-Identifier: Apache-2.0
"""Stock onnxruntime on the exported graphs against the runtime on the bundle packed from them.

docs/verification.md says what is compared, why bits may differ here, and where the bounds come from.

chain.py    from weights to logits, link by link, and where it breaks
compare.py  what both compute, and how far apart it is
report.py   what was found, as JSON and as page.html
"""
