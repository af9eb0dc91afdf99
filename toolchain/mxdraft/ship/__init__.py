# SPDX-License-Identifier: Apache-2.0
"""From C sources and a bundle to devices.

targets.py  what a machine is (targets/*.toml)
build.py    the C runtime for a target
elf.py      the audit of what was linked
wheel.py    a Python wheel with a target's library and command line
deb.py      a Debian package of a target's command line
manual.py   its man page and completions
release.py  all that is handed out, with sums and bill of materials
deploy/     shipping a bundle and the runtime to devices
"""
