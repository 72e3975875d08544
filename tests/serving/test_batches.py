"""Which requests share a run: counted, without sockets, in one loop of events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.serving.batches import SharedRuns


def answers(
    folder: Path, fed: list[dict[str, Any]], turns: int = 1, **options: Any
) -> tuple[list[Any], dict[str, int]]:
    """What becomes of requests that are all there before the model begins, or come in `turns`; the counts behind."""
    x, scale = ht.placeholder("x", (None, None)), ht.placeholder("scale", (None, 1))
    y = ht.sum(x * ht.constant(np.arange(4, dtype="float32")), axis=1) * scale[:, 0]
    ht.save_model(folder / "m.hetu", {"y": y}, ht.Executor([y]).state)
    batches = SharedRuns(
        ht.Predictor(folder / "m.hetu"), **{"most_rows": 8, "pause": 0.0, "most_waiting": 99, **options}
    )

    async def asked(number: int, each: dict[str, Any]) -> Any:
        for _ in range(number % turns):
            await asyncio.sleep(0)
        return await batches.predict(batches.predictor.fitting(each))

    async def all_of_them() -> list[Any]:
        waiting = asyncio.gather(*(asked(*each) for each in enumerate(fed)), return_exceptions=True)
        return await asyncio.wait_for(waiting, 60)

    return asyncio.run(all_of_them()), batches.counts


def rows(count: int, width: int = 4, scales: int | None = None) -> dict[str, Any]:
    return {"x": np.full((count, width), count), "scale": np.full((count if scales is None else scales, 1), 2)}


JOINED: dict[str, tuple[list[dict[str, Any]], int]] = {  # and how many runs there are
    "one": ([rows(3)], 1),
    "as many as fit": ([rows(3), rows(3), rows(2)], 1),
    "too many": ([rows(3), rows(3), rows(3)], 2),
    "a small one passes a large one": ([rows(3), rows(6), rows(5)], 2),
    "larger than a run": ([rows(9), rows(1)], 2),
    "none": ([rows(0), rows(1)], 2),
    "other sizes": ([rows(1), rows(1, width=1), rows(1), rows(1, width=1)], 2),
    "one scale for all": ([rows(2), rows(2, scales=1), rows(2)], 2),
}


@pytest.mark.parametrize("case", JOINED)
def test_requests_of_one_kind_share_a_run(case: str, tmp_path: Path) -> None:
    fed, runs = JOINED[case]
    found, counts = answers(tmp_path, fed)
    for each, answer in zip(fed, found, strict=True):
        np.testing.assert_allclose(answer["y"], 12.0 * each["x"][:, 0], rtol=1e-6)
    counted = sum(len(each["x"]) for each in fed if len(each["x"]) == len(each["scale"]))
    assert counts == {"requests": len(fed), "runs": runs, "rows": counted}


def test_one_that_does_not_fit_is_told_and_the_others_are_answered(tmp_path: Path) -> None:
    """By its open sizes, which are seen first when its rows are asked for."""
    found, _ = answers(tmp_path, [rows(1), rows(1, width=3), rows(2, scales=3), rows(1)])
    assert [type(each).__name__ for each in found] == ["dict", "FeedError", "FeedError", "dict"]


def test_the_queue_ends(tmp_path: Path) -> None:
    found, counts = answers(tmp_path, [rows(1)] * 5, most_waiting=3)
    assert [type(each).__name__ for each in found] == ["dict"] * 3 + ["QueueFull"] * 2 and counts["requests"] == 3


def test_each_of_many_is_answered_as_if_it_were_alone(tmp_path: Path) -> None:
    """Of all sizes, wrong ones among them, which come while the model runs."""
    draw = np.random.default_rng(0)
    fed = [rows(draw.integers(7), draw.choice([4, 4, 4, 1, 3]), draw.choice([None, None, 1, 2])) for _ in range(200)]
    found, counts = answers(tmp_path, fed, turns=17, most_waiting=200)
    for each, answer in zip(fed, found, strict=True):
        (count, width), scales = each["x"].shape, len(each["scale"])
        if width == 3 or (count != scales and 1 not in (count, scales)):
            assert isinstance(answer, ht.errors.FeedError), each
        else:
            wanted = np.sum(each["x"] * np.arange(4), axis=1) * 2 * np.ones(scales)
            np.testing.assert_allclose(answer["y"], wanted, rtol=1e-6)
    assert counts["requests"] == 200
