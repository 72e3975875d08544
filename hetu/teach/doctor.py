"""`hetu doctor`: what is installed, what each missing part would enable, and a job of 2 ranks and 1 server as a test.

It repairs nothing, but names the command that does.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass

import numpy as np

from ..core.backend import Device
from ..core.errors import MissingDependencyError
from ..core.kernels import kernels
from ..dist.comm.world import world
from ..dist.launch import openmpi
from ..dist.launch.mpiexec import find_mpiexec
from ..job import cores
from ..progress import CROWD
from ..ps.store.partition import Parameter
from ..ps.wire.environment import connect
from ..system import crowd

DEADLINE = 60.0  # seconds that the job may take, which is one or two on a machine that does nothing else
ADD_OPEN_MPI = "$(python -m hetu.dist.launch.openmpi)"
ANSWER = "sum 3.0, from the server 2.0"


@dataclass(frozen=True)
class Finding:
    """One part: whether it is there, what was found, what it enables, and the command that adds it if it is missing."""

    part: str
    ok: bool
    found: str
    enables: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command `hetu doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--clear-compiled", action="store_true", help="first remove the compiled code that is kept")


def main(args: argparse.Namespace) -> int:
    """0 if the parts that `pip install` brings are there and the job runs, else 1."""
    mpi = _package("MPI binding", "mpi4py", "ranks", "pip install mpi4py mpich")
    zeromq = _package("ZeroMQ binding", "pyzmq", "parameter servers", "pip install pyzmq")
    jupyter = _package("Jupyter", "jupyterlab", "tutorials as notebooks", 'pip install "hetu-dl[tutorials]"')
    needed = [python(), numpy(), mpi, mpiexec(), zeromq]
    if args.clear_compiled and kernels("cpu").compiled:
        kernels("cpu").compiled.clear()
    code = compiled_code()  # asks for the folder first, and so hears of it
    optional = [load(), c_compiler(), code, survival(), curve(), cupy(), gpu(), nccl(), compiler(), jupyter]
    needed.append(job())
    if args.json:
        print(json.dumps([asdict(f) for f in (*needed, *optional)], indent=1))
    else:
        print("\n".join(report(needed, "needed") + report(optional, "optional")))
    return int(not all(f.ok for f in needed))


WIDE = 96  # of what was found, in a table; a long path loses its middle


def report(findings: list[Finding], title: str) -> list[str]:
    """The lines of one table.

    >>> print(*report([Finding("MPI", False, "not installed", "ranks", "pip install x")], "needed"), sep="\\n")
    needed
      --  MPI               not installed
                            needed for ranks: pip install x
    """
    lines = [title]
    for f in findings:
        found = f.found if len(f.found) <= WIDE else f"{f.found[: WIDE // 2]}...{f.found[3 - WIDE // 2 :]}"
        lines.append(f"  {'ok' if f.ok else '--'}  {f.part:<17} {found}")
        if not f.ok:
            lines.append(f"{'':24}needed for {f.enables}" + (f": {f.fix}" if f.fix else ""))
    return lines


# -- the parts -----------------------------------------------------------------------------------------------


def python() -> Finding:
    version, machine, count = platform.python_version(), f"{platform.system()} {platform.machine()}", cores()
    return Finding("Python", True, f"{version} on {machine}, {count} core{'s' * (count > 1)}", "hetu")


def load() -> Finding:
    """Whether others want the cores, too. Threads of BLAS wait for each other by spinning, and so take theirs."""
    share, count = crowd(), os.cpu_count() or 1
    found = (
        f"{share * count:.1f} processes want {count} core{'s' * (count > 1)}" if share else "the system does not say"
    )
    fix = "OPENBLAS_NUM_THREADS=1, or end some"
    return Finding("Load", share <= CROWD, found, "times that mean something, and several threads", fix)


def numpy() -> Finding:
    library = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    threads = kernels("cpu").threads()
    direct = "called as NumPy does" if threads is None else f"called directly, {threads} thread{'s' * (threads > 1)}"
    return Finding("NumPy", True, f"{np.__version__}, {library['name']} {library['version']} {direct}", "hetu")


def mpiexec() -> Finding:
    try:
        path = find_mpiexec()
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=DEADLINE, check=False)
        lines = [" ".join(line.split()) for line in answer.stdout.splitlines() if line.strip()]
        version = next((line for line in lines if "ersion" in line), lines[0] if lines else "says nothing")
        return Finding("MPI launcher", answer.returncode == 0, f"{os.path.basename(path)}: {version}", "ranks")
    except (MissingDependencyError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("MPI launcher", False, str(error).splitlines()[0], "ranks", "pip install mpich")


def survival() -> Finding:
    """Whether there is an MPI whose ranks survive the loss of one; the other one is the faster to start."""
    enables = "heturun --elastic: ranks that survive losses"
    try:
        mpirun = openmpi.find()[0]
        answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=DEADLINE, check=False)
        version = next((line for line in answer.stdout.splitlines() if line.strip()), "says nothing")
        return Finding("Elastic ranks", answer.returncode == 0, f"{version} in {openmpi.folder()}", enables)
    except MissingDependencyError:
        return Finding("Elastic ranks", False, f"no Open MPI in {openmpi.folder()}", enables, ADD_OPEN_MPI)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Elastic ranks", False, str(error).splitlines()[0], enables, ADD_OPEN_MPI)


def curve() -> Finding:
    enables = "servers on other hosts (their traffic is encrypted)"
    try:
        import zmq
    except ImportError:
        return Finding("ZeroMQ's CURVE", False, "no ZeroMQ", enables, "pip install pyzmq")
    has = bool(zmq.has("curve"))
    return Finding("ZeroMQ's CURVE", has, f"libzmq {zmq.zmq_version()} {'has' if has else 'lacks'} it", enables)


def cupy() -> Finding:
    names = [d.name for d in importlib.metadata.distributions() if (d.name or "").startswith("cupy")]
    return _package("CuPy", names[0] if names else "cupy", "device='gpu'", 'pip install "hetu-dl[gpu]"')


def gpu() -> Finding:
    try:
        xp = Device("gpu").xp
        name = xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        return Finding("GPU", True, f"{name}, CUDA driver {xp.cuda.runtime.driverGetVersion()}", "device='gpu'")
    except MissingDependencyError:
        return Finding("GPU", False, "none that CuPy can use", "device='gpu'; everything else works without")


def nccl() -> Finding:
    names = [d.name for d in importlib.metadata.distributions() if (d.name or "").startswith("nvidia-nccl")]
    name = names[0] if names else "nvidia-nccl-cu13"
    return _package("NCCL", name, "ranks that talk from GPU to GPU", 'pip install "hetu-dl[gpu]"')


def compiler() -> Finding:
    enables, fix = "compiling kernels for a GPU that is not there", 'pip install "hetu-dl[cuda-check]"'
    found = kernels("gpu").architectures()
    text = f"makes code for {', '.join(found)}" if found else "not installed"
    return Finding("CUDA compiler", bool(found), text, enables, fix)


def c_compiler() -> Finding:
    part, enables = "C compiler", "fast operators on a CPU; NumPy stands in"
    library = kernels("cpu").compiled
    if library is None:
        return Finding(part, False, "its room of kernels is missing or switched off", enables)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are what is found
        ok, found, fix = library.about()
    return Finding(part, ok, f"{found:.90}", enables, fix)


def compiled_code() -> Finding:
    part, enables, library = "Compiled code", "a quick start", kernels("cpu").compiled
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = library.kept() if library is not None else "none"
    wrong, _, fix = str(heard[0].message).partition(" (fix: ") if heard else ("", "", "")
    return Finding(part, not wrong, wrong or found, enables, fix.removesuffix(")"))


def _package(part: str, distribution: str, enables: str, fix: str) -> Finding:
    try:
        return Finding(part, True, f"{distribution} {importlib.metadata.version(distribution)}", enables)
    except importlib.metadata.PackageNotFoundError:
        return Finding(part, False, "not installed", enables, fix)


# -- the job -------------------------------------------------------------------------------------------------


def job() -> Finding:
    """Whether 2 ranks add numbers and a server gives back what was pushed."""
    launch = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "-s", "1"]
    start, enables = time.monotonic(), "training on several ranks"
    try:
        ended = subprocess.run(
            [*launch, sys.executable, "-m", "hetu.teach.doctor"],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        fix = "end what else keeps the machine busy, or see where it waits: heturun --help"
        return Finding("2 ranks, 1 server", False, f"did not end within {DEADLINE:g} s", enables, fix)
    if ended.returncode == 0 and ended.stdout.count(ANSWER) == 2:
        return Finding("2 ranks, 1 server", True, f"work together ({time.monotonic() - start:.1f} s)", enables)
    return Finding("2 ranks, 1 server", False, (ended.stderr.strip() or "wrong sums").splitlines()[-1], enables)


def rank() -> None:
    """What each rank of the job does."""
    comm, total = world(), np.empty(1)
    comm.all_reduce(np.array([comm.rank + 1.0]), total)
    client = connect()
    client.create({"x": Parameter((1,), "float64", options={"learning_rate": 1.0})}, {"x": np.zeros(1)})
    client.push("x", np.array([-2.0]))
    client.clock().wait()
    print(f"sum {total[0]}, from the server {client.pull('x').wait()[0]}")


if __name__ == "__main__":
    rank()
