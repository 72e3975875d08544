"""The loop in the process of a student's code: load the files, then answer calls until the grader hangs up.

Requests come through standard input, answers leave through standard output; both are moved away before the student's
code is loaded, which then reads nothing and prints to the notes. The student's code may do to this module whatever it
likes: answers are compared elsewhere.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import signal
import sys
import traceback
from types import ModuleType
from typing import Any

from . import codec, walls
from .clock import Clock
from .comm import RankComm

DRIVER = "_driver.py"
TEXT = 2_000  # letters of an error that travel


class TooLong(BaseException):
    """Raised in the student's line that still runs when the time for a call is nearly over."""


class Inside:
    """The student's module, its driver, and the pipes to the grader."""

    def __init__(self) -> None:
        self.requests = os.fdopen(os.dup(0), "rb")
        self.answers = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        self.folder = ""
        self.seconds, self.until, self.clock = 0.0, 0.0, Clock()
        self.student: ModuleType = ModuleType("student")
        self.driver: ModuleType = ModuleType("driver")

    def begin(self) -> None:
        """Take the settings, build the walls, load the driver and the student's file, and say how that went."""
        settings = codec.receive(self.requests)
        for name in settings["first"]:
            importlib.import_module(name)
        self.folder, self.seconds = settings["folder"], settings["seconds"]
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self.ring)
        os.chdir(self.folder)
        sys.path.insert(0, self.folder)
        built = walls.build(*(settings[name] for name in ("readable", "listed", "memory", "processor_seconds")))
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        codec.send(self.answers, ["walls", built])
        codec.send(self.answers, self.loaded(settings["driver"], settings["file"]))

    def ring(self, *_: object) -> None:
        if (left := self.until - self.clock.now()) > 0.01:
            signal.setitimer(signal.ITIMER_REAL, left)
            return
        raise TooLong(f"still running after {self.seconds:g} s: does a loop never end?")

    def alarm(self, seconds: float) -> None:
        """Have the clock ring in so many seconds; 0 stops it."""
        self.until = self.clock.now() + seconds
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def loaded(self, driver: str, file: str) -> list[Any]:
        try:
            if driver:
                self.driver = self.module(driver)
                self.driver.ask = self.ask  # type: ignore[attr-defined]
            self.alarm(self.seconds)
            self.student = self.module(file)
            self.alarm(0)
        except BaseException as error:
            return self.explained(error)
        return ["value", None]

    def module(self, file: str) -> ModuleType:
        name = os.path.splitext(file)[0]
        spec = importlib.util.spec_from_file_location(name, os.path.join(self.folder, file))
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is no Python file")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    def answer(self, request: list[Any]) -> list[Any]:
        """What a call came to: a value, an error, or that it is not written yet."""
        _, name, args, kwargs, rank, ranks = request
        try:
            given = [RankComm(rank, ranks, self.exchange), *args] if ranks else args
            driven = getattr(self.driver, name, None)
            self.alarm(self.seconds)
            value = driven(self.student, *given, **kwargs) if driven else getattr(self.student, name)(*given, **kwargs)
            codec.encode(value)
            self.alarm(0)
        except NotImplementedError:
            self.alarm(0)
            return ["blank"]
        except BaseException as error:
            return self.explained(error)
        return ["value", value]

    def exchange(self, sends: list[Any], recvs: list[int | None]) -> list[tuple[int, Any]]:
        """Hand messages to the grader, and wait until those asked for have come."""
        return self.told(["exchange", sends, recvs])

    def ask(self, name: str, *args: Any) -> Any:
        """What the grader's function of that name says; a driver finds this as its own `ask`."""
        return self.told(["ask", name, list(args)])

    def told(self, question: list[Any]) -> Any:
        self.alarm(0)  # how long this waits is for the grader to say, who knows for whom
        codec.send(self.answers, question)
        value = codec.receive(self.requests)[1]
        self.alarm(self.seconds)
        return value

    def explained(self, error: BaseException) -> list[Any]:
        """An exception as data: its class, its words, and the last of the student's lines that led to it."""
        self.alarm(0)
        try:
            words = getattr(error, "message", None)
            text = words if isinstance(words, str) else str(error)
        except BaseException:
            text = ""
        if isinstance(error, SyntaxError) and error.filename:
            name, text = os.path.basename(error.filename), error.msg
            return ["error", type(error).__name__, text[:TEXT], [name, error.lineno or 0, (error.text or "").strip()]]
        if isinstance(error, AttributeError) and error.obj is self.student:
            return [
                "error",
                "NameError",
                f"nothing defines {error.name}: its line is gone, or its cell was not run",
                [],
            ]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(self.folder)]
        frames = [f for f in frames if os.path.basename(f.filename) != DRIVER]
        place: list[Any] = []
        if frames:
            number = frames[-1].lineno or 0
            line = linecache.getline(frames[-1].filename, number).strip()
            place = [os.path.basename(frames[-1].filename), number, line[:TEXT]]
        return ["error", type(error).__name__[:TEXT], text[:TEXT], place]


def main() -> None:
    """Until the grader hangs up."""
    inside = Inside()
    inside.begin()
    while True:
        try:
            request = codec.receive(inside.requests)
        except EOFError:
            return
        answer = inside.answer(request)
        codec.send(inside.answers, answer)
