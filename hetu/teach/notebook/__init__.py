"""One notebook cell on many ranks: `%load_ext hetu`, then `%%ranks 4 --servers 2` above a cell.

The cell runs on a persistent pool of real MPI ranks (and parameter servers); names that rank 0 has afterward come back
to the notebook. `wire.py` says what may travel, `rank.py` is one rank, `pool.py` the kernel's side of all of them,
`magic.py` what is typed and seen; `cells.py` lets a cell that is run again make the same names. All ranks are here.
`labs.py` is `%lab`: what a lab's checks say about the cells that have run.
"""

from __future__ import annotations

from typing import Any

from ...core.errors import MissingDependencyError


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext hetu` calls."""
    try:
        from .magic import RankMagics
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"%%ranks needs {error.name}", fix="pip install 'hetu-dl[tutorials]'") from None

    magics = RankMagics(shell)
    shell.register_magic_function(magics.run, "cell", "ranks")
    shell.register_magic_function(magics.manage, "line", "ranks")
    shell.register_magic_function(magics.watch, "line", "servers")
    shell.register_magic_function(magics.lab, "line", "lab")
