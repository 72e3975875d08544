"""Data parallelism over groups of unequal size or speed, with tensor parallelism inside each group.

A fast pair of devices may take two thirds of a batch, and a single device one third. Gradients are summed over the
groups, for any inner splits (HSPMD in Hetu v2, Haoyang Li et al., 2025). The user gives the shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from ...core.errors import ArgumentError
from ...ranges import AtLeast1
from ..layout.groups import Groups
from .builders import Parallel, Stage


class Heterogeneous(Parallel):
    """`groups` of ranks divide each batch by their `shares`; a group splits weights as `TensorParallel` does.

    `zero`, `accumulate` and `statistics` are those of `Parallel`: what is sharded over groups is so by their shares.

    >>> Heterogeneous([(0, 1), (2,)], shares=(2, 1))
    Heterogeneous(groups=[(0, 1), (2,)], shares=(2, 1))
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        shares: Sequence[int],
        *,
        split: Mapping[str, int] | None = None,
        zero: Stage = 0,
        accumulate: AtLeast1 = 1,
        statistics: str = "batch",
    ) -> None:
        ranks = sorted(chain.from_iterable(groups))
        if ranks != list(range(len(ranks))) or len(shares) != len(groups):
            raise ArgumentError(
                f"groups {groups} with shares {shares}", fix="name every rank in one group, and give each group a share"
            )
        super().__init__(data=len(groups), split=split, zero=zero, accumulate=accumulate, statistics=statistics)
        self.groups = Groups(groups, shares)

    def mesh(self, ranks: Sequence[int]) -> Groups:
        if (wanted := sum(map(len, self.groups.groups))) != len(ranks):
            raise ArgumentError(f"groups of {wanted} ranks, there are {len(ranks)}", fix=f"heturun -w {wanted} ...")
        return self.groups
