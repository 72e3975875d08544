"""C text in, functions out: a folder that keeps what a compiler has made.

A `CSource` is a text with functions. It is built at the first need of one of them, together with all others that are
wanted by then, and kept by a key of everything that its code depends on: the text, the prelude, the flags, the compiler
and the CPU, as homes are shared between machines. A library is built in a folder of its own and moved into place whole,
under a lock, so that ranks which start together compile it once. A library is only loaded if it is whole, as its digest
beside it says.

Nothing needs a compiler. Without one, or with `HETU_CC=0`, everything runs as NumPy calls; whatever goes wrong on the
way to a library is a warning beside that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..job import cores
from . import compiler as cc
from .compiler import QUICKLY, SETTING, Compiler, Run, compiler, switch_off
from .folder import entries, folder, lock, private, show_life, tidy

CONTRACT = "#pragma STDC FP_CONTRACT ON"  # which gcc takes from its command line only
MOST_BYTES = 256_000_000  # of the folder; what was not used for longest goes first
MADE = "made_of_"  # begins the name of the mark of a text, which ends in its key
LEAST, MOST = 8, 64  # functions that are worth a compiler of their own, and that it ends with soon on a busy machine


@cache
def text_of(file: str) -> str:
    """A file of C text of this folder, with those that it includes by `#include "..."`."""
    return _whole(files(__package__).joinpath(file).read_text("utf-8"))


@lru_cache(1024)
def _whole(text: str) -> str:
    return re.sub(r'^#include "(.+)"$', lambda found: text_of(found[1]), text, flags=re.M)


# -- sources -----------------------------------------------------------------------------------------------------------


class CSource:
    """A text with functions, each a `void f(const Word* a, long long first, long long last, char* scratch)`.

    Where the text says `CONTRACT`, a product and a sum may become one fused multiply-add, which tiles need for their
    speed. The bits of others are those of NumPy and of any compiler. `shared` is the name of the one function of a text
    that says no such thing and may stand in a unit with others of that name; `shown` is the text before files of this
    folder were included, and `own` the operators in it whose expressions the program wrote itself.
    """

    def __init__(self, shown: str, key: str, shared: str = "", own: Sequence[str] = ()) -> None:
        self.shown, self.text, self.key, self.shared, self.own = shown, _whole(shown), key, shared, own
        self.library: ctypes.CDLL | None = None
        self.wrong = ""  # why there will be no library

    def loaded(self) -> bool:
        """Whether the library is at hand; loads it from the folder, if it is whole."""
        if self.library is None and not self.wrong:
            with suppress(OSError):
                self.load()
        return self.library is not None

    def load(self) -> None:
        """Load the library. OSError if it is not there, not whole, or not for this machine."""
        path, digest = self.paths(folder())
        if digest.read_text("ascii", "replace") != hashlib.sha256(path.read_bytes()).hexdigest():
            raise OSError(f"{path} is not what was compiled")
        self.library = self.opened(path)
        for file in (path, digest):
            os.utime(file)  # used now

    def opened(self, path: Path) -> ctypes.CDLL:
        """What a compiler has made of it. OSError if that is no library, not all of one or another."""
        _check_end(path)
        library = ctypes.CDLL(str(path))
        if not hasattr(library, MADE + self.key):
            raise OSError(f"{path.name} has nothing of the text that it was to be made of")
        return library

    def paths(self, where: Path) -> tuple[Path, Path]:
        """The library and its digest in a folder."""
        return where / f"{self.key}.so", where / f"{self.key}.sha256"

    def function(self, name: str) -> Any:
        """One of its functions, once it is built."""
        return getattr(self.library, f"{name}_{self.key}" if self.shared else name)

    def part(self) -> str:
        """What stands for it in a unit, with the mark by which a library shows that it is there."""
        named = f"#define {self.shared} {self.shared}_{self.key}\n{self.text}\n#undef {self.shared}"
        return f"{named if self.shared else self.text}\nconst int {MADE}{self.key} = 1;"


def _check_end(path: Path) -> None:
    """OSError if the table at the end of an ELF file is not all there: whoever loads such a file is killed."""
    with path.open("rb") as file:
        head = file.read(64)
    if head[:5] == b"\x7fELF\2" and len(head) == 64:
        (start,), (size, count) = struct.unpack_from("=Q", head, 40), struct.unpack_from("=HH", head, 58)
        if path.stat().st_size < start + size * count:
            raise OSError(f"{path.name} has no end")


_sources: dict[str, CSource] = {}  # by key
_seconds: list[float] = []  # of each time that something was compiled, waiting for others included


def source(text: str, shared: str = "", own: Sequence[str] = ()) -> CSource | None:
    """What is to be built of a text, or None where there is no compiler or it failed at this text before."""
    made_by = compiler()
    if made_by is None:
        return None
    key = _key(made_by, text, shared)
    found = _sources.setdefault(key, CSource(text, key, shared, own))
    return None if found.wrong else found


@lru_cache(4096)
def _key(made_by: Compiler, text: str, shared: str) -> str:
    return hashlib.sha256(f"{_common(made_by)}\0{shared}\0{_whole(text)}".encode()).hexdigest()[:24]


@cache
def _common(made_by: Compiler) -> str:
    """A digest of what all code of a compiler depends on."""
    return hashlib.sha256(
        "\0".join((*made_by.command, *made_by.options, *QUICKLY, made_by.macros, MADE, text_of("prelude.h"))).encode()
    ).hexdigest()


def build(wanted: Sequence[CSource]) -> bool:
    """Make all of these ready, at once where the folder lacks several; whether that went well."""
    made_by, start = compiler(), time.perf_counter()
    if not all([s.loaded() for s in wanted]) and made_by is not None:
        lacking = [s for s in dict.fromkeys(wanted) if not s.loaded() and not s.wrong]
        try:
            with lock(made_by.notice.check):
                lacking = [s for s in lacking if not s.loaded()]  # meanwhile another process may have built them
                units = _units(lacking)
                wrong = _compile(made_by, units)
                spoiled = [s for unit in units if len(unit) > 1 for s in unit if s in wrong]  # by one of them
                wrong |= _compile(made_by, [[s] for s in spoiled])
                for s in lacking:
                    s.wrong = "" if s.loaded() else wrong[s]
                tidy(MOST_BYTES)
        except OSError as error:  # a full disk, for instance
            for s in lacking:
                s.wrong = "" if s.loaded() else str(error)
            if isinstance(error, TimeoutError):  # it would be waited for again and again
                switch_off()
        _seconds.append(time.perf_counter() - start)
        failed = [s for s in lacking if s.wrong]
        if failed:
            cc.warn(f"{made_by.command[0]} made no library: {failed[0].wrong:.400} (fix: {_fix(made_by, failed)})")
    return all(s.library is not None for s in wanted)


def _fix(made_by: Compiler, failed: Sequence[CSource]) -> str:
    """What to do. An operator of the program may be at fault where no text without one failed, and a trial does not."""
    own = dict.fromkeys(name for s in failed for name in s.own)
    at_fault = all(s.own for s in failed) and not _trial(made_by)
    code = f"the expression `code=` of {' or '.join(own)}, else " if at_fault else ""
    return f"{code}another compiler as {SETTING}, or {SETTING}=0"


def _trial(made_by: Compiler) -> str:
    """What is wrong with a small library of a text of our own."""
    trial = CSource(text_of(WALKER), "trial")
    try:
        with private() as where, _begun(made_by, [trial], Path(where)) as run:
            well, said = run.end()
            if well:
                trial.opened(trial.paths(Path(where))[0])
    except OSError as error:
        return str(error)
    return "" if well else said


def _units(lacking: Sequence[CSource]) -> list[list[CSource]]:
    """What is compiled as one text each: the time of a compiler's start is shared, but all processors have work."""
    shared = [s for s in lacking if s.shared]
    count = max(min(cores(), -(-len(shared) // LEAST)), -(-len(shared) // MOST))
    return [[s] for s in lacking if not s.shared] + [shared[k::count] for k in range(count)]


def _compile(made_by: Compiler, units: Sequence[Sequence[CSource]]) -> dict[CSource, str]:
    """Compile units side by side and move what was made into the folder; the sources that failed, and why."""
    wrong: dict[CSource, str] = {}
    at_once = cores()
    for k in range(0, len(units), at_once):
        with ExitStack() as running:  # in a folder of its own: names in the cache are second names of files there
            some, where = units[k : k + at_once], Path(running.enter_context(private()))
            runs = [running.enter_context(_begun(made_by, unit, where)) for unit in some]
            for unit, run in zip(some, runs):
                well, said = run.end(show_life)
                reason = _moved(unit, where) if well else said
                wrong |= dict.fromkeys(unit, reason) if reason else {}
    return wrong


def _begun(made_by: Compiler, unit: Sequence[CSource], where: Path) -> Run:
    text = where / f"{unit[0].key}.c"
    text.write_text("\n".join((text_of("prelude.h"), *(s.part() for s in unit))), "utf-8")
    flags = ["-ffp-contract=fast" if CONTRACT in unit[0].text else "-ffp-contract=off"]
    flags += QUICKLY if unit[0].shared else ()
    return made_by.start(text, unit[0].paths(where)[0], flags)


def _moved(unit: Sequence[CSource], where: Path) -> str:
    """Move what was compiled into the folder, once for each of the unit, and load it; what is wrong with it, if any."""
    made, digest = unit[0].paths(where)
    whole = where / "whole"
    try:
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest(), "ascii")
        for s in unit:
            for file, place in zip((digest, made), reversed(s.paths(folder()))):
                _same(file, whole)
                os.replace(whole, place)
            s.load()
    except OSError as error:
        for path in (path for s in unit if s.library is None for path in s.paths(folder())):
            with suppress(OSError):
                path.unlink()
        return str(error)
    return ""


def _same(file: Path, other: Path) -> None:
    """A second name of a file, or a copy where a disk knows no such."""
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)


# -- what others ask ---------------------------------------------------------------------------------------------------

WALKER = "walk.c"  # the text that every table needs


def digest() -> bytes:
    """What ranks have alike that compute alike, in 8 bytes: the texts of kernels and all rules; zeros for NumPy."""
    walker = source(text_of(WALKER))
    return bytes(8) if walker is None or not build([walker]) else _all_rules()


@cache
def _all_rules() -> bytes:
    found, package = hashlib.sha256(), Path(__file__).parent.parent
    for file in sorted(f for f in package.rglob("*") if f.suffix in (".py", ".c", ".h")):
        found.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return found.digest()[:8]


def built() -> list[CSource]:
    """What this process has libraries of."""
    return [s for s in _sources.values() if s.library is not None]


def spent() -> float:
    """The seconds that this process has spent on compiling."""
    return sum(_seconds)


def about() -> tuple[bool, str, str]:
    """Whether there is a compiler, which and what a library costs or why there is none, and what to do then."""
    made_by = compiler()
    if made_by is None:
        fix = f"leave {SETTING} out" if os.environ.get(SETTING) else 'pip install "hetu-dl[cc]"'
        return False, cc.why_none(), fix
    start, wrong = time.perf_counter(), _trial(made_by)
    seconds = f"a small library takes {time.perf_counter() - start:.2f} s"
    return (
        not wrong,
        f"{made_by.version}; {wrong.splitlines()[-1] if wrong else seconds}",
        f"another compiler as {SETTING}",
    )


def kept() -> str:
    """How much is kept, and where."""
    try:
        sizes = [nbytes for _, nbytes, path in entries() if path.suffix == ".so"]
    except OSError as error:  # not even for this process
        return f"nothing can be kept: {error}"
    return f"libraries: {len(sizes)}, {sum(sizes) / 1e6:.1f} of at most {MOST_BYTES / 1e6:.0f} MB, in {folder()}"


def clear() -> None:
    """Remove all that is kept. Processes that have loaded it go on."""
    with lock():
        tidy(most=0)
