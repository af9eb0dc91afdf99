# SPDX-License-Identifier: Apache-2.0
"""Every refusal mxdraft makes, and the exit code it ends a command with (docs/cli.md).

MxdraftError
├── UsageError            2  the request makes no sense
├── RefusedError          3  a file is missing, damaged, or not what it claims to be
│   └── BundleError          … with the verdict code of runtime/BUNDLE.md
├── CapacityError         4  does not fit memory or context
├── NumericError          5  a non-finite value, or bits that differ from the golden ones
└── TransferError         6  input/output failed: disk, network
"""

from __future__ import annotations


class MxdraftError(Exception):
    """Base of all errors meant for the user: the message says what was wrong, where, and what to do."""

    exit_code = 1


class UsageError(MxdraftError):
    exit_code = 2


class RefusedError(MxdraftError):
    exit_code = 3


class BundleError(RefusedError):
    """A bundle was refused. ``verdict`` is the name after MXD_BAD_ (e.g. ``"RANGE"``)."""

    def __init__(self, verdict: str, message: str) -> None:
        super().__init__(message)
        self.verdict = verdict


class CapacityError(MxdraftError):
    exit_code = 4


class NumericError(MxdraftError):
    exit_code = 5


class TransferError(MxdraftError):
    exit_code = 6
