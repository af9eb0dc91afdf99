# SPDX-License-Identifier: Apache-2.0
"""mxdraft trace: a run recorded token by token (the format: docs/trace.md).

record.py  while it goes on
read.py    read back, checked
page.py    shown, with page.html and page.js
"""
