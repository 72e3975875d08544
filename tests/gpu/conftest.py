"""On a device: outcomes are written as they come, and a process whose device is broken gives way to another.

An illegal access spoils the context of its process, and with it every later test there. Ignored on purpose: runs
without workers, which have nobody to go on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

FAILED: list[str] = []


@pytest.fixture(autouse=True)
def numpy_on_the_cpu(request, monkeypatch):
    """What a GPU computes is compared with what operators mean, not with kernels in C, which take long to compile."""
    if request.node.get_closest_marker("compiled") is None:
        monkeypatch.setenv("HETU_CC", "0")


def pytest_addoption(parser):
    parser.addoption("--outcomes", type=Path, help="a file to which the outcome of each test is added at once")


def pytest_configure(config):
    path = config.getoption("--outcomes")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(path))


class Outcomes:
    """One line of JSON for each test that has a say: what it called, or what failed or was skipped before it."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            message = "" if report.passed else reason(report)
            line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "message": message}
            self.file.write(json.dumps(line) + "\n")


def reason(report) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)[-6000:]


def pytest_runtest_logreport(report):
    if report.failed and "gpu" in report.keywords:
        FAILED.append(report.nodeid)


def pytest_runtest_logfinish(nodeid):
    if "PYTEST_XDIST_WORKER" in os.environ and nodeid in FAILED and broken():
        os._exit(1)


def broken() -> bool:
    """Whether the context of this process is of no use any more."""
    cupy = sys.modules.get("cupy")
    if getattr(cupy, "__file__", None) is None:  # not there, or the stand-in
        return False
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return True
    return False
