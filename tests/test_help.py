"""What `--help` of every command shows: what it does, a word for each option, and the default of one that has some."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetu
from hetu import cli
from hetu.dist.launch import options

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(
    path
    for path in (*(ROOT / "examples").rglob("*.py"), ROOT / "hetu/gpu_kernels/check.py")
    if "parse_args()" in (text := path.read_text("utf-8")) or ".parse()" in text
)


class Asked(Exception):
    """A script has made its parser."""


def parser_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """The parser of a script, which gets no further."""

    def asked(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Asked(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", asked)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.syspath_prepend(str(path.parent))
    before = set(sys.modules)
    inside = path.is_relative_to(ROOT / "hetu")
    try:
        with pytest.raises(Asked) as found:
            if inside:
                runpy.run_module(".".join(path.relative_to(ROOT).with_suffix("").parts), run_name="__main__")
            else:
                runpy.run_path(str(path), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:  # files beside it, whose names others have too
            if Path(getattr(sys.modules[name], "__file__", None) or "").parent == path.parent:
                del sys.modules[name]
    return found.value.args[0]


def silent(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The options, those of commands below too, that say nothing or do not show what they are without being given."""
    formatter = argparse.HelpFormatter("")
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (name for name, command in action.choices.items() if not command.description)
            for name, command in action.choices.items():
                yield from (f"{name} {option}" for option in silent(command))
            continue
        shown = formatter._expand_help(action) if action.help else ""
        given = action.default
        switch = given in (None, False, "", argparse.SUPPRESS) or given == []
        words = given if isinstance(given, list | tuple) else [given]
        told = "default: all" in shown if action.choices and [*words] == [*action.choices] else False
        if not shown or "None" in shown or not (switch or told or all(str(word) in shown for word in words)):
            yield action.option_strings[0] if action.option_strings else action.dest


def test_what_is_silent_is_found() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--much", default=3, help="how much (%(default)s)")
    parser.add_argument("--more", default=3, help="how much more")
    parser.add_argument("--none", help="nothing (%(default)s)")
    below = parser.add_subparsers(dest="what").add_parser("below")
    below.add_argument("--mute", action="store_true")
    assert list(silent(parser)) == ["--more", "--none", "below", "below --mute"]


def test_hetu_and_its_commands() -> None:
    assert list(silent(cli.parser())) == []


def test_the_first_hour_types_commands_that_there_are() -> None:
    text = (ROOT / "docs/first_hour.md").read_text("utf-8")
    typed = [line.split() for block in re.findall(r"```bash\n(.*?)```", text, re.S) for line in block.splitlines()]
    ours = [words[1:] for words in typed if words[0] == "hetu"]
    assert len(ours) >= 4
    for words in ours:
        if words != ["--version"]:  # which ends
            assert cli.parser().parse_args(words).command == words[0]


def test_heturun() -> None:
    parser, _ = options.parse([])
    assert list(silent(parser)) == []
    servers = next(group for group in parser._action_groups if group.title == "parameter servers")
    untold = [a for a in servers._group_actions if a.nargs != 0 and "default" not in a.help]
    assert [a.dest for a in untold] == ["snapshots", "imports"]  # which have none


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == ROOT / "examples/benchmarks/ml.py":
        pytest.importorskip("sklearn", reason="which it compares with, is of the extra [dev]")
    assert list(silent(parser_of(path, monkeypatch))) == []


def test_hetu_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hetu {hetu.__version__}\n")
