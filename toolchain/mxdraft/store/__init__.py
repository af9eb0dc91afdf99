# SPDX-License-Identifier: Apache-2.0
"""Ready bundles: got from an index, checked, kept in the user's cache under their names.

index.py   what an index says, and making one
kept.py    the bundles of this machine: get, list, remove
"""
