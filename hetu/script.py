"""What training scripts share: the options of their command line, and the executor and the run that these ask for.

A script adds options of its own, builds its model, trains it, and says what it has reached in one last line. Seed,
device, precision, strategy and checkpoint are looked after here. Left out: options from files, several runs at once.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from .answers import answer_calls as _answer_calls
from .core.errors import ArgumentError, HetuError
from .core.executor import Executor
from .core.graph import Node
from .core.passes import PRECISIONS
from .core.placement import STRATEGIES, STRATEGY
from .data.loader import DataLoader
from .job import job_size
from .look.history import History
from .ps.wire.environment import has_servers
from .ranges import AtLeast0, AtLeast1
from .schedules import cosine
from .training import ADD, Batches, fit
from .updates import accumulated

__all__ = ["Script", "number", "positive", "told"]


class Script:
    """A training script: its `options`, and what is made of them.

    `about` is the docstring of the script, of which `--help` shows the first sentence. The numbers are the defaults of
    the options of these names; `learning_rate` is the highest. A script that steps by itself is `without` the options
    that it does not look after, so that they are refused and not forgotten.

    >>> script = Script("Fit a line: `python line.py`.", epochs=3, batch_size=10, learning_rate=0.1)
    >>> _ = script.add("--slope", type=number, default=2.0, help="of the line")
    >>> options = script.parse(["--epochs", "1", "--precision", "bfloat16"])
    >>> options.epochs, options.batch_size, options.slope
    (1, 10, 2.0)
    """

    def __init__(
        self,
        about: str | None,
        *,
        epochs: AtLeast1,
        batch_size: AtLeast1,
        learning_rate: AtLeast0,
        without: Sequence[str] = (),
    ) -> None:
        title = (about or "").partition("\n")[0].partition(": `")[0]
        self.parser = argparse.ArgumentParser(description=title)
        self.add: Callable[..., Any] = self.parser.add_argument_group("this script").add_argument
        self.options, self.rank = argparse.Namespace(), 0
        self.limits: list[tuple[str, dict[str, Any]]] = []  # options, and with which values of others they do anything
        shared = self.parser.add_argument_group("training").add_argument

        left_out = [*without]

        def add(option: str, **told: Any) -> None:
            if option in left_out:  # whoever asks for it finds the default
                left_out.remove(option)
                self.parser.set_defaults(**{option[2:].replace("-", "_"): told.get("default")})
            else:
                shared(option, **told)

        numbers: dict[str, Any] = {"type": positive, "metavar": "N"}
        add("--epochs", default=epochs, help="passes over the training data (%(default)s)", **numbers)
        add(
            "--batch-size", default=batch_size, help="samples of a step, of all ranks together (%(default)s)", **numbers
        )
        add(
            "--learning-rate",
            type=number,
            default=learning_rate,
            metavar="RATE",
            help="at first (%(default)s); it falls to 0 along a cosine",
        )
        add("--accumulate", default=1, help="batches of an update (%(default)s)", **numbers)
        add("--limit", help="train on the first N samples only", **numbers)
        add(
            "--seed",
            default=0,
            help="of the first weights, the order of the data, and dropout (%(default)s)",
            **numbers | {"type": lambda text: positive(text, 0)},
        )
        add("--checkpoint", metavar="PATH", help="write it after each epoch, and continue from it if it exists")
        add("--log", metavar="PATH", help="a .csv or .json, or a folder for TensorBoard, written after each epoch")
        add("--device", default="cpu", help="cpu or gpu (%(default)s)")
        add("--precision", choices=PRECISIONS, default="float32", help="what products compute in (%(default)s)")
        add(
            "--strategy",
            choices=STRATEGIES,
            default=_spread(),
            help=f"how ranks, and servers, share the work ({_spread() or 'nobody shares it'})",
        )
        if left_out:
            raise ArgumentError(f"without={left_out} are no options of all scripts", fix='name them as in "--limit"')

    def only(self, option: str, **where: Any) -> None:
        """Refuse `option`, which others have an effect with alone: `only("--dropout", model=("gpt2",))`.

        The values of the other option stand in a sequence, None for one that is not given.
        """
        self.limits.append((option, where))

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The options, from the command line."""
        self.options = self.parser.parse_args(arguments)
        for option, where in self.limits:
            name = option[2:].replace("-", "_")
            for other, values in where.items():
                given, there = getattr(self.options, other), ", ".join(map(str, values))
                if getattr(self.options, name) != self.parser.get_default(name) and given not in values:
                    needs = f"it needs --{other} {there}" if values != (None,) else f"leave out --{other}"
                    self.parser.error(f"{option} has no effect with --{other} {given}: {needs}, or leave {option} out")
        return self.options

    def first(self, data: Any) -> Any:
        """The first `--limit` samples of `data`, by default all."""
        return data.take(self.options.limit) if self.options.limit else data

    def batches(self, data: Any, **options: Any) -> DataLoader:
        """Shuffled batches as asked for, of all samples if these are fewer; `options` are those of a `DataLoader`."""
        asked = {"batch_size": min(self.options.batch_size, len(data)), "shuffle": True, "seed": self.options.seed}
        return DataLoader(data, **asked | options)

    def rate(self, batches: Sized, highest: float | None = None) -> Any:
        """The learning rate over the updates of the whole run: a cosine from the highest to 0."""
        updates = self.options.epochs * -(-len(batches) // self.options.accumulate)
        return cosine(highest or self.options.learning_rate, steps=updates)

    def executor(self, subgraphs: Mapping[str, Sequence[Any]], strategy: Any = None) -> Executor:
        """An executor as asked for; `strategy` comes before that of a name."""
        if self.options.accumulate > 1:
            kinds = [(e, e) if isinstance(e, Node) else accumulated(e) for e in subgraphs["train"]]
            subgraphs = {**subgraphs, **dict(zip((ADD, "train"), map(list, zip(*kinds))))}
        asked = {name: getattr(self.options, name) for name in ("seed", "device", "precision")}
        made = Executor(subgraphs, strategy=strategy or self.options.strategy, **asked)
        self.rank = made.placement.rank
        return made

    def fit(self, executor: Executor, batches: Batches, **options: Any) -> History:
        """Train as asked for, and print the table of all epochs; `options` are those of `ht.fit`."""
        path = self.options.checkpoint
        kept = {"checkpoint": path, "resume": path is not None, "log": self.options.log}
        kept["accumulate"] = self.options.accumulate
        history = fit(executor, batches, epochs=self.options.epochs, **kept | options)
        self.say(str(history))
        return history

    def say(self, text: str) -> None:
        """Print, on the first rank alone."""
        if self.rank == 0:
            print(text)


def positive(text: str, least: int = 1) -> int:
    """What an option gives as a whole number from `least` up; argparse tells others."""
    if text.strip().isdecimal() and int(text) >= least:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} up")


def number(text: str) -> float:
    """What an option gives as a finite number from 0 up; argparse tells others, NaN among them.

    >>> number("0.01")
    0.01
    """
    with contextlib.suppress(ValueError):
        if 0 <= (found := float(text)) < math.inf:
            return found
    raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 up")


def told(make: Callable[[str], Any]) -> Callable[[str], Any]:
    """What `make` makes of an option; argparse tells what it refuses, and the remedy, of which it would say nothing.

    >>> from hetu.ps.store.consistency import consistency
    >>> str(told(consistency)("ssp:3"))
    'ssp:3'
    """

    def made(text: str) -> Any:
        try:
            return make(text)
        except HetuError as error:
            raise argparse.ArgumentTypeError(f"{error.message}; {error.fix}") from None

    return made


def _spread() -> str | None:
    """The strategy where none is named: `$HETU_STRATEGY`, or what the job has: servers, or other ranks."""
    several = "hybrid" if has_servers() else "dp" if job_size() > 1 else None
    return os.environ.get(STRATEGY, several)


_answer_calls(__name__)
