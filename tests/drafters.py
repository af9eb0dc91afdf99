# SPDX-License-Identifier: Apache-2.0
"""Drafters that know what comes: always right, never, sometimes, or in trees."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

VOCAB = 500  # of the models that they draft for

Node = tuple[int, int]  # token, and the index of the node before it
# Makes a tree from what comes, the number of nodes to propose and a source of chance.
Proposer = Callable[[list[int], int, random.Random], list[Node]]


def chain(ids: Sequence[int]) -> list[Node]:
    return [(token, i - 1) for i, token in enumerate(ids)]


def oracle(coming: list[int], most: int, _: random.Random) -> list[Node]:
    return chain(coming[:most])


def evil(coming: list[int], most: int, _: random.Random) -> list[Node]:
    """Never right; after the end, anything."""
    return chain([(token + 1) % VOCAB for token in (coming + [9] * most)[:most]])


def chance(coming: list[int], most: int, rng: random.Random) -> list[Node]:
    """A chain whose tokens are right three times in four."""
    right = coming + [9] * most
    return chain([right[i] if rng.random() < 0.75 else rng.randrange(VOCAB) for i in range(most)])


def tree(coming: list[int], most: int, rng: random.Random) -> list[Node]:
    """Any tree whose nodes are right for their depth half of the time; siblings may be equal."""
    right, nodes, depths = coming + [9] * most, list[Node](), [-1]
    for i in range(most):
        parent = rng.randint(-1, i - 1)
        depths.append(depths[parent + 1] + 1)
        nodes.append((right[depths[-1]] if rng.random() < 0.5 else rng.randrange(VOCAB), parent))
    return nodes


PROPOSERS: dict[str, Proposer] = {"oracle": oracle, "evil": evil, "random": chance, "tree": tree}


def accepted_nodes(nodes: list[Node], coming: list[int]) -> list[int]:
    """Return the indices of the nodes that are what comes, from the first one down."""
    path = [-1]
    for token in coming:
        path += [i for i, node in enumerate(nodes) if node == (token, path[-1])][:1] or [-2]
        if path[-1] == -2:
            return path[1:-1]
    return path[1:]


def is_on_branch(nodes: list[Node], i: int) -> bool:
    """Tell whether a node, or one above it, has an elder sibling, which has the place in the KV cache."""
    if i < 0:
        return False
    parent = nodes[i][1]
    return any(other[1] == parent for other in nodes[:i]) or is_on_branch(nodes, parent)


@dataclasses.dataclass
class Knowing:
    """A drafter of a sequence whose continuation it knows. Counts the nodes that have to be accepted."""

    propose: Proposer
    start: int  # tokens of the prompt
    continuation: list[int]
    length: int = 15
    accepted: int = 0
    on_branch: int = 0

    def __call__(self, ids: list[int], most: int) -> list[Node]:
        coming = self.continuation[len(ids) - self.start :]
        nodes = self.propose(coming, min(most, self.length), random.Random(str(ids)))
        right = accepted_nodes(nodes, coming)
        self.accepted += len(right)
        self.on_branch += sum(is_on_branch(nodes, i) for i in right)
        return nodes
