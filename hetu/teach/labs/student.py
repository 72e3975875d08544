"""A submission as a check sees it: `student.name(...)` calls a function over there, and returns plain data.

What goes wrong on the other side is an exception here: `Blank` for what is not written yet, `NoAnswer` with words and
the student's own line for the rest. Processes are started when they are asked for, and again after one has ended.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .inside.codec import NotPlain
from .process import Allowance, Ended, Process, elapsed
from .ranks import Failed, Ran, Switch
from .submission import Code


class Blank(Exception):
    """The function raised NotImplementedError."""


class NoAnswer(Exception):
    """It raised, ended, waited in vain or is late; the text says what was seen."""


@dataclass
class Student:
    """One submission under its checks. `rng` is seeded after its code was loaded."""

    code: Code
    limits: Allowance = field(default_factory=Allowance)
    seed: int | None = None  # for a grading that can be repeated; by default drawn when the code has been loaded

    def __post_init__(self) -> None:
        self.processes: list[Process] = []
        self.walls: list[str] = []
        self.serves: dict[str, Callable[..., Any]] = {}  # what a driver may ask during a call, by name
        self.spent = 0.0
        self.notes = ""  # the beginning of what the code has printed
        self._rng: np.random.Generator | None = None
        self._unloadable: Exception | None = None

    @property
    def rng(self) -> np.random.Generator:
        """Random numbers that the code cannot have known when it was loaded."""
        if self._rng is None:
            self.ready(1)
            self.seed = secrets.randbits(64) if self.seed is None else self.seed
            self._rng = np.random.default_rng(self.seed)
        return self._rng

    @property
    def source(self) -> str:
        """The text of the lab's file."""
        return self.code.files[self.code.main]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.call(name, *args, **kwargs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the driver's function, or else the student's, with plain data. Blank or NoAnswer without a value."""
        (process,) = self.ready(1)
        started = process.clock.now()
        try:
            process.send(["call", name, list(args), kwargs, 0, 0])
            return self.value(self.served(process))
        except (Ended, NotPlain) as error:
            self.restart()
            raise NoAnswer(str(error)) from None
        finally:
            self.spent += process.clock.now() - started

    def served(self, process: Process) -> Any:
        """The answer to a call; until it comes, what the driver asks of `serves` is answered."""
        answer, deadline = process.read(), process.clock.now() + self.limits.total
        while process.clock.now() < deadline:
            match answer:
                case ["ask", str(asked), list(args)] if asked in self.serves:
                    try:
                        told = self.serves[asked](*args)
                    except BaseException:  # the process waits for what will not come
                        self.restart()
                        raise
                    process.send(["answer", told])
                    answer = process.read()
                case _:
                    return answer
        raise Ended(f"still asking after {self.limits.total:g} s: does a loop never end?")

    def on_ranks(self, n: int, name: str, args: Sequence[Sequence[Any]], rendezvous: bool = True, **kwargs: Any) -> Ran:
        """Call it on `n` ranks, as `name(comm, *args[rank])`; with `rendezvous` a send waits for its receiver."""
        processes = self.ready(n)
        started = elapsed(processes)
        try:
            return Switch(processes, rendezvous).run(name, args, kwargs)
        except Failed as failed:
            if not failed.is_over:
                self.restart()
            try:
                return Ran([self.value(failed.answer, f"rank {failed.rank}: ")], [])
            except NoAnswer as wrong:
                raise NoAnswer(f"{wrong}{failed.others}") from None
        except (Ended, NotPlain) as error:
            self.restart()
            raise NoAnswer(str(error)) from None
        finally:
            self.spent += elapsed(processes) - started

    def ready(self, n: int) -> list[Process]:
        """The first `n` processes, with the code loaded. Blank or NoAnswer if that fails, or if the time is used up."""
        if self.spent > self.limits.total:
            raise NoAnswer(f"not run: the checks before have taken {self.limits.total:g} s together")
        if self._unloadable is not None:
            raise self._unloadable
        new = [Process(self.code, self.limits) for _ in range(n - len(self.processes))]
        self.processes += new
        answers: dict[int, Any] = {}

        def start(index: int) -> None:
            try:
                answers[index] = new[index].start()
            except Ended as error:
                answers[index] = ["error", "", str(error), []]

        threads = [threading.Thread(target=start, args=[k]) for k in range(len(new))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.spent += max((process.loading for process in new), default=0.0)  # to start Python is not their fault
        for k, process in enumerate(new):
            self.walls = process.walls
            try:
                self.value(answers[k], "while the file is loaded: ")
            except (Blank, NoAnswer) as error:
                self._unloadable = error
                self.restart()
                raise
        return self.processes[:n]

    def value(self, answer: Any, before: str = "") -> Any:
        """The value of an answer; Blank or NoAnswer if it has none."""
        match answer:
            case ["value", value]:
                return value
            case ["blank"]:
                raise Blank
            case ["error", str(kind), str(text), list(place)]:
                raise NoAnswer(before + printable(": ".join(filter(None, [kind, text]))) + self.line(place))
        raise NoAnswer(f"{before}the process wrote what is no answer")

    def line(self, place: list[Any]) -> str:
        """The student's own line, as a second line of the text."""
        match place:
            case [str(file), int(number), str(text)]:
                return f"\nin {printable(self.code.place(file, number))}: {printable(text)}"
        return ""

    def restart(self) -> None:
        """End all processes; the next call starts new ones."""
        for process in self.processes:
            process.end()
            self.notes = self.notes or printable(process.notes.decode("utf-8", "replace"))
        self.processes.clear()

    def __enter__(self) -> Student:
        return self

    def __exit__(self, *error: object) -> None:
        self.restart()


def printable(text: str, most: int = 600) -> str:
    """A text without what could steer a terminal, cut at `most` letters."""
    shown = "".join(c if c.isprintable() or c == "\n" else "�" for c in text[:most])
    return shown + ("..." if len(text) > most else "")
