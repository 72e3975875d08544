"""The zoo: every public callable × every mistake with it ends in an error that teaches, or is right for a reason.

How many do not is committed in `left.txt`, callable by callable, and may only fall: a test fails where there are more,
and where there are fewer, so that the number is lowered (`python -m tests.zoo PATTERN`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ..conftest import EXAMPLES_OF_EXTRAS
from .__main__ import cases_of, main, rows
from .calls import owners, targets
from .reasons import RAW, RIGHT

TABLE = rows()
OWNED = owners(targets())
OWNERS = [*OWNED]


@pytest.mark.sampled(12)
@pytest.mark.parametrize("label", OWNERS)
def test_every_mistake_is_answered(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = getattr(OWNED[label][0].function, "__module__", "")
    if package := EXAMPLES_OF_EXTRAS.get(f"{module.replace('.', '/')}.py"):
        pytest.importorskip(package)  # without which it has no example
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETU_KERNELS", "0")
    cases = cases_of(label)
    left = [case for case in cases if " left: " in case]
    found = (len(cases), len(left))
    assert found == TABLE[label], (
        f"{TABLE[label]} are committed, {found} found, renew by python -m tests.zoo {label}:\n" + "\n".join(left)
    )


def test_the_table_is_of_what_is_public() -> None:
    assert [*TABLE] == OWNERS


def test_there_are_enough_mistakes_and_few_are_left() -> None:
    """The second number may only fall."""
    assert sum(cases for cases, _ in TABLE.values()) >= 3000
    assert sum(left for _, left in TABLE.values()) == LEFT


LEFT = 0  # of the mistakes in the table


def test_a_pattern_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETU_KERNELS", "0")
    with pytest.raises(SystemExit, match=r"embed\.\* is no callable: give whole labels"):
        main(["embed.*", "--raise"])


def test_every_reason_has_rows() -> None:
    assert all(rows and all(len(row) == 3 for row in rows) for rows in (RIGHT | RAW).values())
