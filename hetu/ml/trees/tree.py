"""Grown trees: the leaf of each row, what it holds, which columns mattered, and the tree as text.

Several trees are one table of nodes with several roots, through which all rows walk at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ...ops.trees import tree_leaves
from .bins import compute

ROWS = 8192  # that walk at a time


@dataclass(frozen=True)
class Trees:
    """Nodes of one or several trees, one array for each fact. A leaf is a node whose `lefts` is 0.

    A row goes from a node to that of `lefts` where its number in the column `features` is at most `thresholds`, else
    to the node after that. `values` (nodes, outputs) are what leaves predict, `gains` what a cut improved the sum of
    losses by, `counts` how many rows came by.
    """

    features: np.ndarray
    thresholds: np.ndarray
    lefts: np.ndarray
    values: np.ndarray
    gains: np.ndarray
    counts: np.ndarray
    roots: np.ndarray

    def leaves(self, X: np.ndarray) -> np.ndarray:
        """(rows, columns) -> (rows, trees): the numbers of leaves among all nodes."""
        out = np.empty((len(X), len(self.roots)), np.int64)
        compute(tree_leaves, out, np.ascontiguousarray(X), self.features, self.thresholds, self.lefts, self.roots)
        return out

    def summed(self, X: np.ndarray, turns: int = 1) -> np.ndarray:
        """(rows, columns) -> (rows, turns * outputs): the sums over trees of the values of leaves.

        Of trees that take turns each `turns`-th is summed apart.
        """
        parts = [np.zeros((0, turns * self.values.shape[1]))]
        for begin in range(0, len(X), ROWS):
            found = self.values[self.leaves(X[begin : begin + ROWS])]
            parts.append(found.reshape(len(found), -1, turns * self.values.shape[1]).sum(axis=1))
        return np.concatenate(parts)

    def numbers(self) -> np.ndarray:
        """(nodes,): of which tree each is."""
        return np.repeat(np.arange(len(self.roots)), np.diff(self.roots, append=len(self.lefts)))

    def importances(self, columns: int) -> np.ndarray:
        """(columns,): the share of the gains that each column has, in the mean of the trees."""
        of = self.numbers()
        shares = np.zeros((len(self.roots), columns))
        inner = self.lefts > 0
        np.add.at(shares, (of[inner], self.features[inner]), np.maximum(self.gains[inner], 0))
        sums = shares.sum(axis=1, keepdims=True)
        mean: np.ndarray = (shares / np.where(sums > 0, sums, 1)).mean(axis=0)
        mean /= mean.sum() or 1.0
        return mean

    def text(self, names: Sequence[Any] = (), tree: int = 0, shown: Any = None) -> str:
        """One tree as lines: the rows that came by and the value of each node, `shown` as a function of it makes it."""
        lines: list[str] = []
        waiting = [(int(self.roots[tree]), "", "")]
        while waiting:
            node, margin, said = waiting.pop()
            value = self.values[node].round(4).tolist() if shown is None else shown(self.values[node])
            lines.append(f"{margin}{said}{self.counts[node]} rows, {value}")
            left = int(self.lefts[node])
            if left:
                column, inner = int(self.features[node]), margin + ("|   " if said else "")
                name, at = names[column] if len(names) else f"x{column}", f"{self.thresholds[node]:.4g}"
                waiting += [(left + 1, inner, f"{name} > {at}: "), (left, inner, f"{name} <= {at}: ")]
        return "\n".join(lines)


def joined(trees: Sequence[Trees]) -> Trees:
    """All of them as one table; a node's number grows by those of the trees before."""
    before = np.cumsum([0, *(len(tree.lefts) for tree in trees)])[:-1]
    made = {f.name: np.concatenate([getattr(tree, f.name) for tree in trees]) for f in fields(Trees)}
    made["lefts"] = np.concatenate([np.where(t.lefts > 0, t.lefts + b, 0) for t, b in zip(trees, before)])
    made["roots"] = np.concatenate([tree.roots + b for tree, b in zip(trees, before)])
    return Trees(**made)
