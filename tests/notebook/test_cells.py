"""Cells that run again, in a real IPython shell and in a real kernel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hetu as ht

ROOT = Path(__file__).parent.parent.parent
BEGIN = "import hetu as ht\nx = ht.placeholder('x', (None, 4))"
FIRST = "a = ht.nn.Linear(4, 4); h = ht.dropout(a(x), 0.5); rate = ht.schedules.Plateau(0.1)"
SECOND = "b = ht.nn.Linear(4, 2); y = b(h); o = ht.optim.Adam(rate); t = o.minimize(ht.mean(y))"
NAMES = "ex = ht.Executor([t]); print(sorted(ex.state))"
TWICE = "a = ht.nn.Linear(4, 3); h = ht.nn.Linear(3, 4)(a(x)); rate = 0.1"
SHELL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell, text in json.load(sys.stdin):
    result = shell.run_cell(text, cell_id=cell)
    result.raise_error()
"""
KERNEL = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
try:
    for cell, text in json.load(sys.stdin):
        content = {"code": text, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = client.session.msg("execute_request", {**content, "stop_on_error": True}, metadata={"cellId": cell})
        client.shell_channel.send(message)
        while (said := client.get_iopub_msg(timeout=60))["content"].get("execution_state") != "idle":
            if said["msg_type"] == "stream":
                print(said["content"]["text"], end="")
            elif said["msg_type"] == "error":
                raise SystemExit("\\n".join(said["content"]["traceback"]))
finally:
    manager.shutdown_kernel(now=True)
"""


def printed(script: str, cells: list[tuple[str | None, str]]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(cells),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("script", [SHELL, KERNEL], ids=["ipython", "kernel of ipython"])
def test_a_cell_that_runs_again_makes_the_names_that_it_made(script: str) -> None:
    pytest.importorskip("IPython" if script is SHELL else "ipykernel", reason="an extra is not installed")
    cells = [("begin", f"{BEGIN}; {FIRST}"), ("second", SECOND), ("names", NAMES)]
    again = [cells[0], ("begin", f"{BEGIN}; {FIRST}"), cells[1], cells[1], cells[2]]
    changed = [("begin", f"{BEGIN}; {TWICE}"), cells[1], cells[2]]
    before = [("import", "import hetu")] if script is SHELL else []  # a kernel knows which cell imports hetu
    first, second, third = printed(script, [*before, *cells, *again, *changed])
    assert first == second and "'linear_1/weight'" in first and "'plateau'" in first
    assert "'linear_2/weight'" in third  # `linear_1` is of the second cell


def test_what_has_no_identity_is_new_each_time_in_ipython() -> None:
    pytest.importorskip("IPython", reason="the extra [dev] is not installed")
    cells = [
        (None, BEGIN),
        (None, "a = ht.nn.Linear(4, 4)"),
        (None, "a = ht.nn.Linear(4, 4)"),
        (None, "print([a.name])"),
    ]
    assert printed(SHELL, cells) == ["['linear_1']"]


def test_curves_grow_below_a_cell_of_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display", reason="the extra [dev] is not installed")
    shown: list[object] = []
    handle = SimpleNamespace(update=lambda value: shown.append(("again", value.epochs)))
    monkeypatch.setattr(display, "display", lambda value, display_id: [shown.append(value.epochs), handle][1])
    show = ht.look.growing_curves()
    for epochs in (1, 2, 3):
        show(ht.History({"loss": [1.0] * epochs}))
    assert shown == [1, ("again", 2), ("again", 3)]
