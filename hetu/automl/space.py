"""What may be chosen, as plain data: numbers in a range, one of several options, and what an option has to choose.

A space is a dictionary of names and domains. An option of a `Categorical` may have a space of its own, whose names are
then `choice.option.name` and are active where that option is chosen. A configuration is a flat dictionary of these
names, which JSON holds. Samplers move *places*, a number from 0 to 1 for each name, NaN where it is not active; their
models see *vectors*, in which each option has a column. Left out: constraints between numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError, UnknownNameError, did_you_mean
from ..ranges import Count, Finite, Whole

Config = dict[str, Any]
ABSENT = 0.5  # what stands in a vector for a number that is not active


@dataclass(frozen=True)
class Float:
    """A number from `low` to `high`, both included; with `log` small numbers are as likely as large ones.

    A search whose space has a `default` begins with it.

    >>> Float(1e-4, 1.0, log=True).at(0.5)
    0.01
    """

    low: Finite
    high: Finite
    log: bool = False
    default: Finite | None = None

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ArgumentError(f"{type(self).__name__} from {self.low} to {self.high}", fix="pass low below high")
        if self.log and self.low <= 0:
            raise ArgumentError(f"log=True from {self.low}", fix="a logarithm needs a range above 0")
        if self.default is not None and not self.holds(self.default):
            raise ArgumentError(f"default={self.default} of {self.low} to {self.high}", fix="pass one that it holds")

    def at(self, place: float) -> Any:
        """The value at a place from 0 to 1."""
        value = float(self._values(min(max(place, 0.0), 1.0)))
        value = float(f"{value:.13g}") if self.log else value  # as one would write it
        return min(max(value, float(self.low)), float(self.high))

    def _values(self, places: Any) -> Any:
        if not self.log:
            return self.low + places * (self.high - self.low)
        return np.exp(math.log(self.low) + places * (math.log(self.high) - math.log(self.low)))

    def place(self, value: Any) -> Any:
        """The place of a value, or of each in an array."""
        if self.log:
            return (np.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)

    def columns(self, places: np.ndarray) -> np.ndarray:
        """What a model sees of places: (many, 1), or for a choice (many, options)."""
        return places[:, None]

    def facts(self) -> list[Any]:
        """What it is made of again."""
        return [self.low, self.high, self.log, *([] if self.default is None else [self.default])]

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


@dataclass(frozen=True)
class Int(Float):
    """A whole number from `low` to `high`, both included.

    >>> [Int(1, 3).at(place) for place in (0.0, 0.5, 1.0)]
    [1, 2, 3]
    """

    low: Whole
    high: Whole
    default: Whole | None = None

    @property
    def _wide(self) -> Float:
        """The range of which each whole number has its share."""
        return Float(self.low - 0.5, self.high + 0.5, self.log)

    def at(self, place: float) -> int:
        return int(min(max(round(self._wide.at(place)), self.low), self.high))

    def place(self, value: Any) -> Any:
        return self._wide.place(value)

    def columns(self, places: np.ndarray) -> np.ndarray:
        return super().columns(self.place(np.clip(np.round(self._wide._values(places)), self.low, self.high)))

    def holds(self, value: Any) -> bool:
        return isinstance(value, int) and self.low <= value <= self.high


class Categorical:
    """One of several options: texts, numbers, True, False or None; as keywords, each with a space of its own.

    >>> Categorical("relu", "tanh").options
    ('relu', 'tanh')
    >>> Space({"model": Categorical(ridge={"alpha": Float(0.1, 10.0)}, tree={})}).names
    ['model', 'model.ridge.alpha']
    """

    def __init__(self, *options: str | float | bool | None, **spaces: Mapping[str, Any]) -> None:
        self.options: tuple[Any, ...] = (*options, *spaces)
        self.inside: dict[Any, Mapping[str, Any]] = {**spaces}
        if len({*map(repr, self.options)}) < len(self.options) or not self.options:
            raise ArgumentError(f"Categorical of {self.options}", fix="pass one option at least, and each of them once")
        for each, names in spaces.items():
            [*_laid(names, f"{each}.")]

    def __repr__(self) -> str:
        return f"Categorical({', '.join(map(repr, self.options))})"

    def facts(self) -> list[Any]:
        """What it is made of again."""
        return [*self.options]

    def holds(self, value: Any) -> bool:
        return any(value is each or (type(value) is type(each) and value == each) for each in self.options)

    def number(self, value: Any) -> int:
        """The number of an option."""
        return next(i for i, each in enumerate(self.options) if type(value) is type(each) and value == each)

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """The numbers of the options at places, -1 for NaN."""
        size = len(self.options)
        return np.where(np.isnan(places), -1, np.minimum(np.nan_to_num(places) * size, size - 1)).astype(int)

    def at(self, place: float) -> Any:
        """The option at a place from 0 to 1."""
        return self.options[self.numbers(np.array(place))]

    def place(self, value: Any) -> float:
        """The middle of the places of an option."""
        return (self.number(value) + 0.5) / len(self.options)

    def columns(self, places: np.ndarray) -> np.ndarray:
        return np.where(np.isnan(places)[:, None], np.nan, np.eye(len(self.options))[self.numbers(places)])


Domain = Float | Categorical


@dataclass(frozen=True)
class Active:
    """A name with its domain, and where it is active: `of` has `option`; everywhere if `of` is empty."""

    name: str
    domain: Domain
    of: str = ""
    option: Any = None


class Space:
    """A dictionary of names and domains, laid flat; `fixed` are the values of names that are no longer open.

    >>> space = Space({"rate": Float(1e-3, 1.0, log=True), "model": Categorical(net={"width": Int(8, 64)}, ridge={})})
    >>> space.check({"rate": 0.1, "model": "ridge"})
    {'rate': 0.1, 'model': 'ridge'}
    >>> space.vectors(space.places([{"rate": 1.0, "model": "ridge"}])).tolist()
    [[1.0, 0.0, 1.0, 0.5]]
    """

    def __init__(self, names: Mapping[str, Any] | Sequence[Active], fixed: Config | None = None) -> None:
        self.fixed = fixed or {}
        self.all = [*(_laid(names) if isinstance(names, Mapping) else names)]
        self.domains = {each.name: each.domain for each in self.all}
        if len(self.domains) < len(self.all):
            said = f"a space with a name twice: {[each.name for each in self.all]!s:.100}"
            raise ArgumentError(said, fix="give what has dots, as the names inside of options have, another name")
        if not self.all:
            raise ArgumentError("a space without names", fix='pass one such as {"rate": ht.automl.Float(0.01, 1.0)}')

    @property
    def names(self) -> list[str]:
        """All names, those that are active under an option only as well."""
        return [*self.domains]

    @property
    def open(self) -> list[Active]:
        """The names that are not fixed."""
        return [each for each in self.all if each.name not in self.fixed]

    def with_fixed(self, values: Config) -> Space:
        """The same space with fewer open names."""
        return Space(self.all, self.fixed | values)

    def made(self, value_of: Any) -> Config:
        """A configuration, by `value_of(active)` for the open names that are active, in order."""
        config: Config = {}
        for each in self.all:
            if not each.of or (each.of in config and config[each.of] == each.option):
                config[each.name] = self.fixed[each.name] if each.name in self.fixed else value_of(each)
        return config

    def config(self, places: np.ndarray) -> Config:
        """The configuration at places (names,)."""
        at = dict(zip(self.domains, places.tolist()))
        return self.made(lambda each: each.domain.at(at[each.name]))

    def places(self, configs: Sequence[Config]) -> np.ndarray:
        """(configurations, names): the places of their values, NaN where a name is not active."""
        for config in configs:
            self._refuse_strange(config)
        rows = [[d.place(c[n]) if n in c else math.nan for n, d in self.domains.items()] for c in configs]
        return np.array(rows, float).reshape(len(configs), len(self.domains))

    def vectors(self, places: np.ndarray) -> np.ndarray:
        """(many, columns) of places (many, names): numbers from 0 to 1, one for each number and for each option of a
        choice; `ABSENT` where not active. ShapeError for other places."""
        if places.shape[1:] != (len(self.domains),) or places.dtype.kind != "f":
            said = f"places {places.dtype}{[*places.shape]} in a space of {len(self.domains)} names"
            raise ShapeError(said, fix="pass what Space.places or Space.scattered made")
        found = np.concatenate([d.columns(own) for d, own in zip(self.domains.values(), places.T)], axis=1)
        return np.where(np.isnan(found), ABSENT, found)

    def settled(self, places: np.ndarray) -> np.ndarray:
        """The same places, of fixed names theirs and NaN where a name is not active."""
        number, found = {name: k for k, name in enumerate(self.domains)}, places.copy()
        for k, each in enumerate(self.all):
            if each.name in self.fixed:
                found[:, k] = each.domain.place(self.fixed[each.name])
            if each.of:
                of: Any = self.domains[each.of]
                found[of.numbers(found[:, number[each.of]]) != of.number(each.option), k] = np.nan
        return found

    def scattered(self, count: Count, rng: np.random.Generator) -> np.ndarray:
        """(count, names): random places."""
        return self.settled(rng.random((count, len(self.all))))

    def moved(self, places: np.ndarray, rng: np.random.Generator, step: float) -> np.ndarray:
        """Neighbors: one name in three, but one at least, moves by about `step`, or is an option chosen anew."""
        can = ~np.isnan(places) & [each.name not in self.fixed for each in self.all]
        lot = rng.random(places.shape) * can
        moves = can & ((lot > 2 / 3) | (lot == lot.max(axis=1, keepdims=True)))
        new = rng.random(places.shape)
        by = np.clip(places + rng.normal(size=places.shape) * step, 0, 1)
        choice = [isinstance(each.domain, Categorical) for each in self.all]
        return self.settled(np.where(np.isnan(places) | (moves & choice), new, np.where(moves, by, places)))

    def drawn(self, rng: np.random.Generator) -> Config:
        """A random configuration."""
        return self.config(self.scattered(1, rng)[0])

    def starts(self) -> list[Config]:
        """With what a search begins: the defaults, once for each option of a choice with names inside.

        Of what has no default the middle of the range, or the first option. Nothing if no number has one.
        """
        if all(isinstance(each.domain, Categorical) or each.domain.default is None for each in self.open):
            return []

        def value_of(each: Active) -> Any:
            default = getattr(each.domain, "default", None)
            return each.domain.at(0.5 * isinstance(each.domain, Float)) if default is None else default

        leading: dict[str, Config] = {}  # to each name, the options above it
        for each in self.all:
            leading[each.name] = {**leading[each.of], each.of: each.option} if each.of else {}
        choices = {each.of: self.domains[each.of].options for each in self.all if each.of}
        chosen = [{}, *({**leading[name], name: option} for name, options in choices.items() for option in options)]
        made = [self.with_fixed(each | self.fixed).made(value_of) for each in chosen]
        return [config for k, config in enumerate(made) if config not in made[:k]]

    def near(self, config: Config, rng: np.random.Generator, step: float = 0.2) -> Config:
        """A neighbor: one number in three, but one at least, moves by about `step` of its range, or is chosen anew."""
        return self.config(self.moved(self.places([config]), rng, step)[0])

    def check(self, config: Mapping[str, Any]) -> Config:
        """A configuration in the order of the names; ArgumentError for what lacks or lies outside of its range."""
        self._refuse_strange(config)

        def value_of(each: Active) -> Any:
            if each.name not in config or not each.domain.holds(config[each.name]):
                got = f"{each.name}={config[each.name]!r}" if each.name in config else f"no {each.name}"
                raise ArgumentError(f"a configuration with {got}", fix=f"pass {each.name} as one of {each.domain}")
            return config[each.name]

        return Space(self.all).made(value_of)

    def _refuse_strange(self, config: Mapping[str, Any]) -> None:
        if strange := config.keys() - self.domains:
            name = min(map(str, strange))
            raise UnknownNameError(f"no {name!r} in the space", fix=did_you_mean(name, self.domains))

    def described(self) -> list[dict[str, Any]]:
        """The space as JSON holds it, by which logs are compared; `parse` makes it again."""
        return [
            {"name": each.name, "of": each.of, "option": each.option, type(each.domain).__name__: each.domain.facts()}
            for each in self.all
        ]

    @classmethod
    def parse(cls, described: Sequence[Mapping[str, Any]]) -> Space:
        """The space of a description; a KeyError, TypeError or ArgumentError if it is none."""
        kinds = {"Float": Float, "Int": Int, "Categorical": Categorical}
        made = []
        for fact in described:
            (kind,) = kinds.keys() & fact.keys()
            made.append(Active(fact["name"], kinds[kind](*fact[kind]), fact["of"], fact["option"]))
        return cls(made)


def _laid(names: Mapping[str, Any], before: str = "", of: str = "", option: Any = None) -> Iterator[Active]:
    for own, domain in names.items():
        name = f"{before}{own}"
        if not isinstance(domain, Domain):
            raise ArgumentError(f"{name} is {domain!r:.60}", fix="pass Float, Int or Categorical")
        yield Active(name, domain, of, option)
        for each, inside in domain.inside.items() if isinstance(domain, Categorical) else ():
            yield from _laid(inside, f"{name}.{each}.", name, each)
