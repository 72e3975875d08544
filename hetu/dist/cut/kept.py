"""Where a variable lives: on the ranks of a job in some layout, or on servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...core.errors import ArgumentError
from ..layout.layout import Layout


@dataclass(frozen=True)
class Kept:
    """How ranks keep a variable: `compute` is what the model reads, `store` what is kept and updated."""

    compute: Layout
    store: Layout

    @property
    def words(self) -> tuple[str, str]:
        """What is read and what is kept, for tables."""
        return str(self.compute), str(self.store)

    def to_json(self) -> dict[str, Any]:
        return {"compute": self.compute.to_json(), "store": self.store.to_json()}


@dataclass(frozen=True)
class Served:
    """A variable that servers keep and update, by the gradients that ranks send.

    Where it is `copied`, each rank has all of it and fetches it anew after each step. Of any other a rank has nothing:
    of a table it fetches the rows that it looks up, and the state of an optimizer is the servers' own business.
    """

    copied: bool = False

    @property
    def words(self) -> tuple[str, str]:
        return "whole" if self.copied else "by rows", "servers"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_kept(data: Mapping[str, Any]) -> Kept | Served:
    """What `to_json` of either wrote."""
    if data.keys() != {"compute", "store"} and (data.keys() != {"copied"} or type(data["copied"]) is not bool):
        raise ArgumentError(f"got {data!r:.80}, wanted compute and store, or copied: true or false")
    if "copied" in data:
        return Served(**data)
    return Kept(Layout.from_json(data["compute"]), Layout.from_json(data["store"]))
