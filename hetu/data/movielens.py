"""Who rated which film, and how: the files of MovieLens, in both of their forms.

GroupLens forbids to redistribute them, so none ship. F. Harper, J. Konstan, "The MovieLens Datasets", ACM TIIS 2015.
Left out: titles, dates and zip codes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import DataError
from . import formats
from .sources import Source, find

GENRES = ("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
          "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War",
          "Western")  # fmt: skip
SMALL, LARGE = ("u.data", "u.user", "u.item"), ("ratings.dat", "users.dat", "movies.dat")


class FilmTables(NamedTuple):
    """Rows of text: (user, film, rating, time), (user, age, gender, occupation), and (film, names of its genres)."""

    ratings: list[list[str]]
    users: list[tuple[str, str, str, str]]
    films: list[tuple[str, list[str]]]


def read(root: str | os.PathLike[str] | None) -> FilmTables:
    """The tables, of whichever form there is; DataError where they do not fit each other."""
    source, read_form = _found(root)
    tables = read_form(source.files)
    for column, table, file in ((0, tables.users, source.files[1]), (1, tables.films, source.files[2])):
        known = {row[0] for row in table}
        for row in tables.ratings:
            if row[column] not in known:
                raise DataError(
                    f"{source.files[0].name} has the number {row[column]!r:.60}, {file.name} has not",
                    fix="take all files from one release",
                )
    return tables


def _found(root: str | os.PathLike[str] | None) -> tuple[Source, Callable[[Sequence[Path]], FilmTables]]:
    """The files of one of the forms, and how they are read."""
    try:
        return find("movielens", LARGE, root=root), _large
    except DataError:
        pass
    try:
        return find("movielens", SMALL, root=root), _small
    except DataError as error:
        either = f"{', '.join(SMALL)}, or {', '.join(LARGE)},"
        fix = f"put {either} into a folder and pass root=, or into $HETU_DATA/movielens"
        raise DataError(error.message, fix=fix) from None


def _small(files: Sequence[Path]) -> FilmTables:
    """MovieLens 100K: tabs and bars, a film's genres as 19 flags."""
    films = []
    for row in _rows(files[2], "|", 5 + len(GENRES)):
        films.append((row[0], [genre for genre, flag in zip(GENRES, row[5:]) if flag == "1"]))
    users = [(row[0], _decade(row[1]), row[2], row[3]) for row in _rows(files[1], "|", 5)]
    return FilmTables(_rows(files[0], "\t", 4), users, films)


def _large(files: Sequence[Path]) -> FilmTables:
    """MovieLens 1M: two colons, a film's genres by name."""
    films = [(row[0], row[2].split("|")) for row in _rows(files[2], "::", 3)]
    users = [(row[0], _decade(row[2]), row[1], row[3]) for row in _rows(files[1], "::", 5)]
    return FilmTables(_rows(files[0], "::", 4), users, films)


def _rows(path: Path, delimiter: str, columns: int) -> list[list[str]]:
    """Rows of text in Latin-1, as these files are; DataError for one with another number of fields."""
    with formats.opened(path) as stream:
        lines = stream.read().decode("latin-1").replace("\r\n", "\n").split("\n")  # other signs do not end a row
    rows = [line.split(delimiter) for line in lines if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) != columns:
            raise DataError(
                f"{path.name}, row {number}: {len(row)} fields, expected {columns}",
                fix=f"each row needs {columns} fields separated by {delimiter!r}",
            )
    if not rows:
        raise DataError(f"{path.name} has no rows", fix="check the file")
    return rows


def _decade(age: str) -> str:
    return f"{age[:-1] or '0'}0s"


def bags(genres: Sequence[Sequence[str]], known: Sequence[str]) -> NDArray[np.int64]:
    """A row for each film: 1 + the place of each of its genres, then 0."""
    bags = np.zeros((len(genres), max(1, *map(len, genres))), np.int64)
    for row, names in zip(bags, genres):
        row[: len(names)] = [1 + known.index(name) for name in names]
    return bags
