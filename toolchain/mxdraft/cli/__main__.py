# SPDX-License-Identifier: Apache-2.0
"""``python -m mxdraft.cli`` is the command ``mxdraft``."""

from mxdraft.cli import main

main()
