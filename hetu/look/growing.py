"""The curves of a training that grow while it goes on, below the cell of a notebook that runs it."""

from __future__ import annotations

from collections.abc import Callable

from ..core.errors import MissingDependencyError


def growing_curves() -> Callable[[object], None]:
    """What shows a history, or whatever a notebook draws, and renews it.

    `ht.fit(..., after_epoch=ht.look.growing_curves())`.

    >>> show = growing_curves()  # doctest: +SKIP
    >>> show(ht.History({"loss": [0.5, 0.25]}))  # doctest: +SKIP
    """
    try:
        from IPython.display import display
    except ImportError:
        raise MissingDependencyError(
            "curves below a cell need IPython", fix="pip install 'hetu-dl[tutorials]'"
        ) from None
    shown = None

    def show(history: object) -> None:
        nonlocal shown
        if shown is None:
            shown = display(history, display_id=True)
        else:
            shown.update(history)

    return show
