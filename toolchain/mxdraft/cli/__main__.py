"""``python -m mxdraft.cli`` is the command ``mxdraft``."""

from mxdraft.cli import main

main()
