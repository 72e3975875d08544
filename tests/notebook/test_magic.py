"""`%%ranks` in a real IPython shell, as typed and as seen."""

from __future__ import annotations

import sys
import threading

import pytest

shells = pytest.importorskip("IPython.core.interactiveshell", reason="the extra [dev] is not installed")


@pytest.fixture(scope="module")
def shell():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "ps1", "", raising=False)  # a shell sets it, and trainings ask whether somebody types
        shell = shells.InteractiveShell.instance()
        shell.run_line_magic("load_ext", "hetu")
        yield shell
        shell.run_line_magic("ranks", "stop")


def run(shell, capsys, text):
    result = shell.run_cell(text)
    return result, capsys.readouterr()


def test_one_cell_text_on_one_and_on_many(shell, capsys):
    cell = "from hetu.dist import world\nmine = world().rank + 10\nmine"
    alone, _ = run(shell, capsys, cell)
    assert alone.result == 10
    _, seen = run(shell, capsys, f"%%ranks 2\n{cell}")
    assert sorted(seen.out.splitlines()) == ["[rank 0] 10", "[rank 1] 11"]
    assert shell.user_ns["mine"] == 10


def test_functions_of_the_notebook_and_imported_ones_go_to_the_ranks(shell, capsys):
    run(shell, capsys, "from math import sqrt\nstep = 2\ndef twice(x):\n    return step * x")
    run(shell, capsys, "def root(x):\n    return sqrt(twice(x))")
    cell = "value = [root(8), step]\nvalue"
    _, seen = run(shell, capsys, f"%%ranks 2\n{cell}")
    assert sorted(seen.out.splitlines()) == ["[rank 0] [4.0, 2]", "[rank 1] [4.0, 2]"]
    run(shell, capsys, "def twice(x):\n    return 200")  # only this one goes again
    _, seen = run(shell, capsys, f"%%ranks 2\n{cell}")
    assert "[rank 1] [14.142135623730951, 2]" in seen.out.splitlines()


def test_a_failure_fails_the_cell(shell, capsys):
    cell = "from hetu.dist import world\nif world().rank:\n    raise ValueError('no')\nworld().barrier()"
    result, seen = run(shell, capsys, f"%%ranks 2\n{cell}")
    assert not result.success
    assert "ValueError: no" in seen.err and "meanwhile rank 0 was at" in seen.err
    assert "the next cell starts new ones" in seen.err


def test_servers_are_shown_below_the_cell_until_they_end(shell, capsys, monkeypatch):
    from hetu.teach.notebook import magic

    shown, renewed = [], threading.Event()

    class Handle:
        def update(self, html):
            shown.append(html.data)
            renewed.set()

    monkeypatch.setattr(magic, "display", lambda *_, **__: Handle())
    run(shell, capsys, "from hetu.ps import *\nserver = ServerProcess(Options(2, 'token', 'ssp:3'))")
    result, _ = run(shell, capsys, "%servers server --every 0.01")
    assert result.success and renewed.wait(20)
    assert shell.user_ns["server"].address in shown[0] and "ssp:3" in shown[0] and "not here yet" in shown[0]
    result, _ = run(shell, capsys, "%servers --stop\nserver.stop()")
    assert result.success and result.result == 0
    _, seen = run(shell, capsys, "one = 1\n%servers one")
    assert "one holds no server" in seen.err and "name a variable that holds a ServerProcess" in seen.err
    _, seen = run(shell, capsys, "%servers server")
    assert "no answer from" in seen.err


def test_ranks_are_shown_below_the_cell(shell, capsys, monkeypatch):
    from hetu.teach.notebook import magic

    shown, renewed = [], threading.Event()

    class Handle:
        def update(self, html):
            shown.append(html.data)
            renewed.set()

    run(shell, capsys, "%%ranks 2\n1")
    monkeypatch.setattr(magic, "display", lambda *_, **__: Handle())
    result, _ = run(shell, capsys, "%ranks watch")
    assert result.success and renewed.wait(20) and "2 ranks, up" in shown[0]
    run(shell, capsys, "%servers --stop")  # one page at a time


@pytest.mark.parametrize("line", ["%%ranks 0\n1", "%%ranks two\n1", "%ranks start", "%servers --every 0"])
def test_bad_lines(shell, capsys, line):
    result, seen = run(shell, capsys, line)
    assert not result.success and "Traceback" not in seen.err
