"""Whatever goes wrong on the way to compiled code, a program's values are right, and a warning says what to do.

Each row is a process of its own with a deadline, which runs a program with two sources: what walks through tables, and
sums, with an operator between that only Python knows. Most are forks that have imported hetu before (`forks.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetu.cpu_kernels import compiled, compiler, folder

from .forks import DEADLINE, ROOT, Fork, Forks

SCRIPT = """
import json, sys, warnings
import numpy as np
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as heard:
    import hetu as ht
    from hetu.cpu_kernels import compiled, compiler, folder
    before
    x = ht.placeholder("x", (2, 3, 6, 6))
    numbers = np.random.default_rng(0).standard_normal(x.shape).astype("f")
    ex = ht.Executor([ht.sum(x, axis=(0, 2, 3)), ht.argsort(x), ht.sum(x, axis=(0, 3))])
    ex.program({x: numbers})
    values = [ex.run({x: numbers}) for _ in range(2)]
for channels, _, rows in values:
    assert np.allclose(channels, numbers.sum((0, 2, 3)), atol=1e-5)
    assert np.allclose(rows, numbers.sum((0, 3)), atol=1e-5)
ready = compiled.built()
print(json.dumps([len(ready) > 1, [str(w.message) for w in heard], str(compiled.folder())]))
"""
pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="the compilers that fail are shell scripts"),
    pytest.mark.compiled,
]


class Place:
    """A home with compilers, in which processes run the program."""

    def __init__(self, home: Path, forks: Forks) -> None:
        self.home, self.kept, self.forks = home, home / "cache" / "hetu" / "compiled", forks
        self.log = home / "log"
        self.log.touch()

    def compiler(self, says: str, name: str = "broken-cc") -> str:
        """A compiler that notes its runs, tells about itself as the real one does, and else does as it `says`.

        There `$made` is the file to write and `$text` the one to read.
        """
        real = shutil.which("cc")
        lines = [
            *("#!/bin/sh", f'case "$*" in *" -E "*) exec {real} "$@";; esac'),
            *(f'echo run >> "{self.log}"', 'for word in "$@"; do', 'case "$word" in *.c) text="$word";; esac'),
            *('[ "$last" = -o ] && made="$word"', 'last="$word"', "done", says.replace("REAL", f'{real} "$@" -O0')),
        ]
        return self.program("\n".join(lines), name)

    def program(self, text: str, name: str = "broken-cc") -> str:
        path = self.home / name
        path.write_text(text + "\n")
        path.chmod(0o700)
        return str(path)

    def variables(self, setting: str) -> dict[str, str]:
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("HETU_", "XDG_"))}
        variables |= {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache"), "PYTHONPATH": str(ROOT)}
        return variables | ({"HETU_CC": setting} if setting else {})

    def start(self, setting: str = "", before: str = "", **more: str) -> Fork:
        return self.forks.start(SCRIPT.replace("before", before or "pass"), self.variables(setting) | more)

    def start_anew(self, setting: str = "", before: str = "", **more: str) -> subprocess.Popen[str]:
        """A process that imports hetu, and is a child of this one."""
        variables = self.variables(setting) | more
        command = [sys.executable, "-c", SCRIPT.replace("before", before or "pass")]
        return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def ended(self, process: Fork | subprocess.Popen[str]) -> tuple[bool, list[str], Path]:
        """Whether the program was compiled, the warnings, and the folder."""
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, err) == (0, "")
        is_compiled, heard, folder = json.loads(out)
        return is_compiled, heard, Path(folder)

    def run(self, *arguments: str, **more: str) -> tuple[bool, list[str], Path]:
        return self.ended(self.start(*arguments, **more))

    def runs(self) -> int:
        return len(self.log.read_text().splitlines())

    def libraries(self) -> list[Path]:
        return sorted(self.kept.glob("*.so"))


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path, forks: Forks) -> Place:
    return Place(tmp_path, forks)


# -- compilers ---------------------------------------------------------------------------------------------------------

# What a compiler does, and what the warning says. The first line of a text that is no script stands for itself.
COMPILERS = {
    "fails": ("echo 'bad flag' >&2; exit 1", "bad flag"),
    "fails at one text": ("grep -q sum_around $text && exit 3; exec REAL", "status 3"),
    "is killed": ("kill -9 $$", "status -9"),
    "hangs": ("sleep 600", "did not end within 1 s"),
    "hangs, and so do its children": ("sleep 600 & sleep 600 & wait", "did not end within 1 s"),
    "writes garbage": ("echo garbage > $made", "broken-cc made no library"),
    "writes no end": ("REAL && truncate -s 9000 $made", "has no end"),
    "writes nothing": ("exit 0", "No such file"),
    "makes another library": (f"cc -shared -fPIC -x c {os.devnull} -o $made", "has nothing of the text"),
    "makes another library of one text": (
        f"grep -q sum_around $text || exec REAL; cc -shared -fPIC -x c {os.devnull} -o $made",
        "has nothing of the text",
    ),
    "says what is no text": (r"printf '\377\376'; exit 1", "broken-cc made no library"),
}
TELLING_NOTHING = {
    "fails at once": ("#!/bin/sh\necho no license; exit 1", "no license"),
    "hangs at once": ("#!/bin/sh\nsleep 600", "did not end within 1 s"),
    "is no program": ("\x7fELF and more", "Exec format error"),
    "says nothing": ("#!/bin/sh\nexit 0", "HETU_CC=0"),
}
SOON = "compiler.DEADLINE = 1.0"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("says", "warned"), COMPILERS.values(), ids=COMPILERS)
def test_a_broken_compiler_is_one_warning(place: Place, says: str, warned: str) -> None:
    is_compiled, heard, _ = place.run(place.compiler(says), SOON if "sleep" in says else "")
    assert is_compiled == ("grep" in says), "other texts are"
    assert len(heard) == 1 and warned in heard[0] and "fix: another compiler as HETU_CC" in heard[0], heard
    assert place.runs() <= (4 if is_compiled else 2)
    assert all(f"{compiled.MADE}{path.stem}".encode() in path.read_bytes() for path in place.libraries())
    assert [f for f in place.kept.iterdir() if f.name.startswith("building")] == []


def test_processes_wait_once_for_a_compiler_that_hangs(place: Place) -> None:
    """None waits for a while; then one does again, as the compiler may only have been slow."""
    setting = place.compiler(f"test -e {place.home}/mended || sleep 600; exec REAL")
    for process in [place.start(setting, SOON) for _ in range(4)]:
        is_compiled, heard, _ = place.ended(process)
        assert not is_compiled and len(heard) == 1 and "made no library: it did not end " in heard[0], heard
    assert place.runs() == 1
    (notice,) = place.kept.glob("*.hangs")
    _, heard, _ = place.run(setting)
    assert len(heard) == 1 and re.search(
        rf"in another process; .* again in \d+ s, or once {notice} is removed", heard[0]
    )
    assert place.runs() == 1
    os.utime(notice, (0, 0))
    place.run(setting, SOON)
    assert place.runs() == 2
    (place.home / "mended").touch()
    os.utime(notice, (0, 0))
    assert place.run(setting) == (True, [], place.kept)


def test_processes_wait_once_for_a_compiler_that_does_not_say_what_it_is(place: Place) -> None:
    setting = place.program(f"#!/bin/sh\necho run >> {place.log}\nsleep 600")
    for process in [place.start(setting, SOON) for _ in range(4)]:
        is_compiled, heard, _ = place.ended(process)
        assert not is_compiled and len(heard) == 1 and "it did not end " in heard[0], heard
    runs = place.runs()
    assert runs <= 4, "they ask at the same time"
    _, heard, _ = place.run(setting)
    assert len(heard) == 1 and "it did not end in another process" in heard[0]
    assert place.runs() == runs


def test_who_waits_for_the_lock_hears_that_the_compiler_hangs(place: Place) -> None:
    """The lock stays taken, so nothing else ends the wait."""
    fcntl = pytest.importorskip("fcntl")
    setting = place.compiler("sleep 600")
    place.run(setting, SOON)
    (notice,) = place.kept.glob("*.hangs")
    os.utime(notice, (0, 0))
    with open(place.kept / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = place.start_anew(setting, "folder.QUIET = 600.0; print('waits', file=sys.stderr, flush=True)")
        assert process.stderr is not None and process.stderr.readline() == "waits\n"
        notice.touch()
        _, heard, _ = place.ended(process)
    assert len(heard) == 1 and "it did not end in another process" in heard[0]
    assert place.runs() == 1


def test_compilers_that_hang_share_the_time_that_one_may_take(place: Place) -> None:
    for name in compiler.NAMES:
        place.program(f"#!/bin/sh\necho run >> {place.log}\nsleep 600", name)
    path = f"{place.home}{os.pathsep}{os.environ['PATH']}"
    _, heard, _ = place.run("", f"{SOON}; compiler.find_spec = lambda name: None", PATH=path)
    parts = [float(part) for part in re.findall(r"within (\S+) s", heard[0])]
    assert len(parts) == 3 and max(parts) < 0.34, heard
    assert place.runs() == 3


def test_the_next_compiler_is_taken_where_one_hangs(place: Place) -> None:
    place.program("#!/bin/sh\nsleep 600", "cc")
    path = f"{place.home}{os.pathsep}{os.environ['PATH']}"
    assert place.run("", "compiler.DEADLINE = 6.0", PATH=path)[:2] == (True, [])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "warned"), TELLING_NOTHING.values(), ids=TELLING_NOTHING)
def test_a_compiler_that_does_not_tell_what_it_is(place: Place, text: str, warned: str) -> None:
    is_compiled, heard, _ = place.run(place.program(text), SOON if "sleep" in text else "")
    assert not is_compiled
    assert len(heard) == 1 and warned in heard[0] and "(fix: name a C compiler that works" in heard[0], heard


@pytest.mark.parametrize(
    ("setting", "warned"),
    [
        ("0", []),
        ("no-such-cc -O1", ["HETU_CC='no-such-cc -O1' is no command"]),
        ('cc "', ["HETU_CC='cc \"' is no command"]),
    ],
)
def test_a_setting_that_names_no_compiler(place: Place, setting: str, warned: list[str]) -> None:
    is_compiled, heard, _ = place.run(setting)
    assert not is_compiled
    assert [w.split(": ", 1)[1].split(" (fix")[0] for w in heard] == warned


def test_no_compiler_at_all(place: Place) -> None:
    is_compiled, heard, _ = place.run("", "compiler.find_spec = lambda name: None", PATH=str(place.home))
    assert (is_compiled, heard) == (False, [])


def test_the_next_compiler_is_taken_where_one_does_not_work(place: Place) -> None:
    place.program("#!/bin/sh\nexit 1", "cc")
    is_compiled, heard, _ = place.run("", PATH=f"{place.home}{os.pathsep}{os.environ['PATH']}")
    assert (is_compiled, heard) == (True, [])


def test_a_path_with_spaces(place: Place) -> None:
    assert place.run(place.compiler("exec REAL", "my cc"))[:2] == (True, [])


@pytest.mark.parametrize("says", ["sleep 600 &", "echo $$ >&2"], ids=["leaves a child", "varies in what it says"])
def test_a_compiler_that_works_and_more(place: Place, says: str) -> None:
    """It is not waited for by what it left, and what it made is found again."""
    setting = place.program(f'#!/bin/sh\necho run >> {place.log}\n{says}\nexec cc "$@"')
    for runs in (3, 4):  # each process asks it what it is
        assert place.run(setting, "compiler.DEADLINE = 50.0") == (True, [], place.kept)
        assert place.runs() == runs


def test_options_of_the_setting_count_more_than_ours(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_CC", "cc -O0")
    made_by = compiler.compiler()
    assert made_by is not None and made_by.options == ("-O0",) and "#define __OPTIMIZE__" not in made_by.macros
    log = place.home / "said"
    setting = place.program(f'#!/bin/sh\necho "$@" >> {log}\nexec cc "$@"')
    assert place.run(f"{setting} -g -O0")[0]
    *_, line = log.read_text().splitlines()
    assert re.search(r" -O[23] .* -g -O0 \S+\.c -o ", line), line


def test_a_compiler_that_does_not_know_this_cpu(place: Place) -> None:
    unknown = 'case "$*" in *=native*) echo "what is native?" >&2; exit 1;; esac'
    setting = place.program(f'#!/bin/sh\n{unknown}\nexec cc "$@"')
    assert place.run(setting)[:2] == (True, [])


@pytest.mark.parametrize(("system", "installed", "expected"), [("darwin", 2, 0), ("darwin", 0, 1), ("linux", 2, 1)])
def test_the_command_that_offers_to_install_a_compiler_is_none(
    monkeypatch: pytest.MonkeyPatch, system: str, installed: int, expected: int
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc" if name == "cc" else None)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], installed))
    assert compiler._candidates("") == [["/usr/bin/cc"]] * expected


def test_an_interrupt_ends_the_compiler_too(place: Place) -> None:
    os.mkfifo(place.home / "pid")
    process = place.start_anew(place.compiler(f"echo $$ > {place.home}/pid; exec sleep 600"))
    compiling = int((place.home / "pid").read_text())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode != 0 and "KeyboardInterrupt" in err
    with pytest.raises(ProcessLookupError):
        os.kill(compiling, 0)
    assert [path.name for path in place.kept.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("echo 'no disk' >&2; exit 1", "no disk"),
        ("echo garbage > $made", "file too short"),
        ("REAL && truncate -s 9000 $made", "trial.so has no end"),
    ],
)
def test_the_doctor_hears_of_a_compiler_that_makes_no_library(
    place: Place, monkeypatch: pytest.MonkeyPatch, says: str, told: str
) -> None:
    monkeypatch.setenv(compiler.SETTING, place.compiler(says))
    well, found, fix = compiled.about()
    assert (well, fix) == (False, "another compiler as HETU_CC")
    assert found.startswith("broken-cc ") and found.endswith(told)


def test_importing_hetu_touches_no_compiler(place: Place) -> None:
    recorder = place.program(f"#!/bin/sh\necho run >> {place.log}\nexec cc $*", "cc")
    variables = os.environ | {"HETU_CC": recorder, "HOME": str(place.home), "XDG_CACHE_HOME": str(place.home)}
    subprocess.run([sys.executable, "-c", "import hetu"], env=variables, check=True, timeout=DEADLINE, cwd=ROOT)
    assert place.runs() == 0
    assert place.run(recorder)[0] and place.runs() == 3


# -- what was kept -----------------------------------------------------------------------------------------------------


def _foreign(path: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", os.devnull, "-o", path], check=True, timeout=DEADLINE)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda path: os.truncate(path, 3000),
    "empty": lambda path: os.truncate(path, 0),
    "garbage": lambda path: path.write_bytes(b"\x7fELF" + bytes(9000)),
    "without the function": _foreign,
    "gone": lambda path: path.unlink(),
    "without a digest": lambda path: path.with_suffix(".sha256").unlink(),
    "nothing": lambda path: None,
    "another digest": lambda path: path.with_suffix(".sha256").write_bytes(b"\xff" * 64),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Place:
    """A place whose folder has all that the program needs."""
    place = Place(tmp_path_factory.mktemp("whole"), forks)
    assert place.run(place.compiler("exec REAL")) == (True, [], place.kept)
    assert place.runs() == len(place.libraries()) == 2
    return place


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_made_anew_and_a_whole_one_is_not(whole: Place, damage: str) -> None:
    libraries, runs = whole.libraries(), whole.runs()
    for path in libraries:
        DAMAGES[damage](path)
    assert whole.run(str(whole.home / "broken-cc"))[:2] == (True, [])
    assert whole.runs() - runs == (0 if damage == "nothing" else 2)
    assert whole.libraries() == libraries


def test_processes_that_start_together_compile_once(place: Place) -> None:
    setting = place.compiler("exec REAL")
    for process in [place.start(setting) for _ in range(4)]:
        assert place.ended(process)[:2] == (True, [])
    assert place.runs() == len(place.libraries()) == 2


def test_a_process_that_is_killed_while_it_builds(place: Place) -> None:
    setting = place.compiler(f"if mkdir {place.home}/second; then kill -9 $PPID; fi; exec REAL")
    process = place.start_anew(setting)
    process.communicate(timeout=DEADLINE)
    assert process.returncode == -9
    assert place.libraries() == []
    assert place.run(setting)[:2] == (True, [])


def test_a_process_that_takes_long_to_build_is_waited_for(place: Place) -> None:
    setting = place.compiler("sleep 2; exec REAL")
    for process in [place.start(setting, "folder.QUIET, compiler.LOOK = 1.0, 0.05") for _ in range(3)]:
        assert place.ended(process)[:2] == (True, [])
    assert place.runs() == len(place.libraries()) == 2


@pytest.mark.parametrize(("says", "is_compiled"), [("sleep 600", False), ("exec REAL", True)], ids=["hangs", "works"])
def test_a_process_that_was_stopped_while_it_built_is_not_waited_for(
    place: Place, says: str, is_compiled: bool
) -> None:
    """Not even where its compiler hangs: all others together wait for that, once."""
    setting = place.compiler(f"if mkdir {place.home}/first; then kill -STOP $PPID; exit 1; fi; {says}")
    stopped = place.start_anew(setting)
    try:
        deadline = time.monotonic() + DEADLINE
        while os.waitpid(stopped.pid, os.WUNTRACED | os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        before = "folder.QUIET, compiler.LOOK = 0.5, 0.05" + ("" if is_compiled else f"; {SOON}")
        others = [place.ended(process) for process in [place.start(setting, before) for _ in range(3)]]
    finally:
        stopped.kill()
        stopped.communicate()
    assert [found for found, _, _ in others] == [is_compiled] * 3
    assert all(len(heard) == (not is_compiled) for _, heard, _ in others), others


def test_the_folder_is_removed_while_a_process_runs(place: Place) -> None:
    before = "import shutil; shutil.rmtree(compiled.folder())"
    assert place.run("", before) == (True, [], place.kept)
    assert len(place.libraries()) == 2


# -- the folder --------------------------------------------------------------------------------------------------------


def _as(kind: str, place: Place) -> None:
    """Put something in the place of the folder, or change one above it."""
    other = place.home / "other"
    other.mkdir(mode=0o700)
    place.kept.parent.mkdir(mode=0o700, parents=True)
    if kind.startswith("a link"):
        place.kept.symlink_to(other)
    elif kind == "a file":
        place.kept.touch()
    else:
        place.kept.mkdir(mode=0o700)
    above = {"cache": place.kept.parent.parent, "hetu": place.kept.parent}
    changed = next((above[word] for word in kind.split() if word in above), place.kept)
    if "somebody" in kind:
        os.chown(changed, 12345, -1)
    elif "group" in kind:
        os.chown(changed, -1, 12345 if "another" in kind else os.getuid())
        changed.chmod(0o770)
    elif "others" in kind:
        changed.chmod(0o1777 if "sticky" in kind else 0o722)


FOLDERS = {
    "a folder": "",
    "a link to a folder": "",
    "a folder that others write": "compiled: others can write there",
    "a link to a folder that others write": "other: others can write there",
    "a folder of somebody else": "compiled: it belongs to somebody else",
    "a file": "File exists",
    "a folder in a cache that others write": "cache: others can write there",
    "a folder in a cache of somebody else": "cache: it belongs to somebody else",
    "a folder in a hetu that others write": "hetu: others can write there",
    "a folder in a hetu of somebody else": "hetu: it belongs to somebody else",
    "a folder in a sticky cache that others write": "",
    "a sticky folder that others write": "compiled: others can write there",
    "a folder in a cache that another group writes": "cache: others can write there",
    "a folder in a cache that the group of its user writes": "",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FOLDERS)
def test_what_may_stand_in_the_place_of_the_folder(place: Place, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if ("somebody" in kind or "group" in kind) and os.getuid():
        pytest.skip("only the administrator can give a folder away")
    _as(kind, place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.home / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(place.home))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = folder.folder.__wrapped__()
    if FOLDERS[kind]:
        assert len(heard) == 1 and FOLDERS[kind] in str(heard[0].message)
        assert found.parent == place.home and found.is_dir()
    else:
        assert (heard, found) == ([], place.kept.resolve())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["a link to a folder", "a folder that others write", "a file"])
def test_a_program_is_compiled_whatever_stands_in_the_place_of_the_folder(place: Place, kind: str) -> None:
    _as(kind, place)
    is_compiled, heard, folder = place.run()
    assert is_compiled
    if FOLDERS[kind]:
        assert len(heard) == 1 and FOLDERS[kind] in heard[0] and "or set XDG_CACHE_HOME" in heard[0]
        assert not folder.exists(), "it is removed with the process"
        assert place.libraries() == []
    else:
        assert (heard, folder) == ([], place.kept.resolve())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_that_is_forked_leaves_the_folder_to_the_one_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "hetu").touch()
    script = (
        "import os, sys\nfrom hetu.cpu_kernels import folder\nmade = folder.folder()\n"
        "if not os.fork():\n    sys.exit()\nos.wait()\nprint(made.is_dir(), made)\n"
    )
    known = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    line = [sys.executable, "-W", "ignore", "-c", script]
    found = subprocess.run(line, env=known, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE, check=True)
    there, made = found.stdout.split()
    assert there == "True" and not Path(made).exists()


TROUBLES = {
    "a home that is only read": (
        "os.access = lambda path, mode: mode != os.W_OK",
        True,
        "nothing can be written there",
    ),
    "a disk that runs no code": (
        "os.statvfs = lambda path: type('', (), {'f_flag': getattr(os, 'ST_NOEXEC', 0)})",
        True,
        "runs no code (noexec)" if hasattr(os, "ST_NOEXEC") else "",
    ),
    "no home": ("del os.environ['XDG_CACHE_HOME']; Path.home = no('home')", True, "no home"),
    "a full disk": ("os.replace = no('space left')", False, "no space left"),
    "a disk too full for a folder": ("compiled.private = no('space left')", False, "no space left"),
    "no locks": ("import fcntl; fcntl.flock = no('locks')", True, ""),
}
NO = """import os; from pathlib import Path
    def no(what):
        def fail(*_): raise OSError(f'no {what}')
        return fail"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("before", "is_compiled", "warned"), TROUBLES.values(), ids=TROUBLES)
def test_trouble_with_the_disk(place: Place, before: str, is_compiled: bool, warned: str) -> None:
    found, heard, _ = place.run("", f"{NO}\n    {before}")
    assert found == is_compiled
    assert [w for w in heard if warned in w and "(fix: " in w] == heard and len(heard) == bool(warned)


def test_the_folder_is_the_users_alone_and_a_relative_path_is_none(place: Place) -> None:
    _, heard, folder = place.run("", XDG_CACHE_HOME="here")
    assert (heard, folder) == ([], place.home / ".cache" / "hetu" / "compiled")
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_is_forked_while_another_thread_builds_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(folder, "folder", lambda: tmp_path)
    with folder.lock():
        if (child := os.fork()) == 0:
            signal.pause()
    try:
        with open(tmp_path / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_was_not_used_for_longest_goes_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.kept.mkdir(parents=True)
    monkeypatch.setattr(folder, "folder", lambda: place.kept)
    for used, name in enumerate("abcd"):
        (place.kept / name).write_bytes(bytes(100))
        os.utime(place.kept / name, (1e9 + used, 1e9 + used))
    for name, used in (("building-old", 1e9), ("building-new", None)):
        (place.kept / name).mkdir()
        os.utime(place.kept / name, used and (used, used))
    folder.tidy(most=250)
    assert sorted(path.name for path in place.kept.iterdir()) == ["building-new", "c", "d"]


# -- units -------------------------------------------------------------------------------------------------------------

NO_LINKS = "os.link = no('links'); "
UNIT = """
compiled.cores = lambda: 2
makes = "void f(const Word* a, long long first, long long last, char* scratch) {{ *(long long*)a[0].p = {}; }}"
made = [compiled.source(makes.format(k if k != 5 else wrong), shared="f") for k in range(12)]
print(compiled.build(made), [bool(s.library) for s in made])
for k, s in enumerate(made):
    found, words = ctypes.c_longlong(), (ctypes.c_void_p * 1)()
    words[0] = ctypes.addressof(found)
    if s.library:
        s.function("f")(words, 0, 1, None)
        assert found.value == k
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("wrong", "is_well", "disk"),
    [
        *(("5", True, disk) for disk in ("", NO_LINKS)),
        *(("nothing", False, disk) for disk in ("", NO_LINKS)),
        ("nothing()", False, ""),
        pytest.param("nothing()", False, NO_LINKS, marks=pytest.mark.nightly),
    ],
)
def test_several_texts_are_one_unit_and_one_of_them_spoils_no_other(
    place: Place, wrong: str, is_well: bool, disk: str
) -> None:
    heads = "import ctypes, warnings; from hetu.cpu_kernels import compiled; warnings.simplefilter('ignore')"
    script = f"wrong = {wrong!r}\n{heads}\nif True:\n    {NO}\n    {disk}\n{UNIT}"
    variables = place.variables(place.compiler("exec REAL"))
    for runs in (2, 2) if is_well else (8, 9):
        said = place.forks.start(script, variables).communicate()
        assert said == (f"{is_well} {[k != 5 or is_well for k in range(12)]}\n", "")
        assert place.runs() == runs


@pytest.mark.parametrize("cores", [1, 2, 16])
@pytest.mark.parametrize("count", [1, 7, 8, 9, 63, 64, 65, 1000])
def test_all_processors_have_work_and_none_too_much_for_a_deadline(
    monkeypatch: pytest.MonkeyPatch, count: int, cores: int
) -> None:
    monkeypatch.setattr(compiled, "cores", lambda: cores)
    given = [compiled.CSource("", f"{k}", "group") for k in range(count)]
    units = compiled._units(given)
    assert sorted(int(s.key) for unit in units for s in unit) == [*range(count)]
    assert len(units) >= min(cores, count // compiled.LEAST) and max(map(len, units)) <= compiled.MOST
    assert max(map(len, units)) - min(map(len, units)) <= 1


# -- operators of the program ------------------------------------------------------------------------------------------

OWN = """
import sys, warnings
import numpy as np
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as heard:
    import hetu as ht
    from hetu.core.types import elementwise
    @ht.op(infer=elementwise, code=sys.argv[1])
    def threefold(xp, x):
        return x * 3
    x = ht.placeholder("x", (40, 50))
    numbers = np.ones(x.shape, "f")
    found = ht.Executor([threefold(x), ht.exp(x)], passes=()).run({x: numbers})
assert np.array_equal(found[0], numbers * 3) and np.allclose(found[1], np.exp(numbers))
print(*(w.message for w in heard), sep="")
"""
BAD, WELL = "y = x * nothing", "y = x * 3"
FULL = "[ $(wc -l < {log}) -gt 1 ] && echo 'No space left on device' >&2 && exit 1; exec REAL"
REFUSES_OURS = "grep -q '// exp' $text && exit 3; exec REAL"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("code", "says", "warned", "is_blamed"),
    [
        (WELL, "exec REAL", "", False),
        (BAD, "exec REAL", "nothing", True),
        (WELL, FULL, "No space left", False),
        (WELL, REFUSES_OURS, "status 3", False),
        (BAD, REFUSES_OURS, "(fix: ", False),
    ],
    ids=["no fault", "its text", "a full disk", "a text of ours", "both"],
)
def test_an_operator_of_the_program_is_named_where_it_may_be_at_fault(
    place: Place, code: str, says: str, warned: str, is_blamed: bool
) -> None:
    variables = place.variables(place.compiler(says.format(log=place.log)))
    process = place.forks.start(OWN, variables, code)
    said, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert warned in said and ("broken-cc made no library: " in said) == bool(warned)
    fix = "the expression `code=` of threefold, else another compiler as HETU_CC"
    assert (f"(fix: {fix}" in said) == is_blamed and ("code=" in said) == is_blamed, said


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_has_everything_that_code_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by = compiler.compiler()
    assert made_by is not None

    def forget() -> None:
        compiled._common.cache_clear(), compiled._key.cache_clear()

    def key(text: str = "a", prelude: str = "p", **other: Any) -> str:
        monkeypatch.setattr(compiled, "text_of", {"prelude.h": prelude}.__getitem__)
        monkeypatch.setattr(compiled, "compiler", lambda: made_by._replace(**other))
        forget()
        made = compiled.source(text)
        assert made is not None
        return made.key

    monkeypatch.setattr(compiled, "_sources", {})
    flags = (*made_by.command, "-O1")
    newer, older = made_by.macros + "#define __VERSION__ 99", made_by.macros + "#define __NO_AVX__ 1"
    keys = [key(), key("b"), key(prelude="q"), key(command=flags), key(macros=newer)]
    assert len({*keys, key(macros=older)}) == 6
    assert key() == keys[0]
    forget()


def test_what_a_text_includes_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.c").write_text('#include <math.h>\n#include "b.h"\nlast')
    (tmp_path / "b.h").write_text("first\n")
    monkeypatch.setattr(compiled, "files", lambda _: tmp_path)
    assert compiled.text_of.__wrapped__("a.c") == "#include <math.h>\nfirst\n\nlast"
    compiled.text_of.cache_clear()
