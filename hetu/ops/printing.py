"""A look at a value while a program runs."""

from __future__ import annotations

import builtins
from types import ModuleType
from typing import Any

from ..core.errors import public
from ..core.graph import Node
from ..core.op import as_node, op
from ..core.types import same_type

__all__ = ["print"]


@op(infer=same_type, dims="...->...", precision="follow")
def printed(xp: ModuleType, x: Any, *, label: str) -> Any:
    """`x`, which is printed on its way.

    >>> import hetu as ht
    >>> printed(ht.placeholder("x", (3,)), label="x").shape
    (3,)
    """
    builtins.print(f"{label}: {x}", flush=True)
    return x


@printed.grad
def printed_grad(g: Node, out: Node, x: Node, *, label: str) -> tuple[Node]:
    return (g,)


@public
def print(x: Any, label: str = "") -> Node:
    """`x`, printed whenever a program computes it; use the result, since what nobody needs is not computed.

    `label` stands before the value, by default what `x` is. On several ranks each prints its part. Gradients pass.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (2,))
    >>> y = ht.sum(ht.print(x * 2, "doubled"))
    >>> _ = ht.Executor([y]).run({x: [1.0, 2.0]})
    doubled: [2. 4.]
    """
    node = as_node(x)
    return printed(node, label=label or repr(node))
