"""Caches that know the coming batches, on ranks with a server: they pull what a count of ids says, and less than LRU.

Ignored on purpose: what is learned, see `examples/benchmarks/hot_rows.py`.
"""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np

import hetu as ht
from hetu import dist, ps
from hetu.data import ArrayDataset, DataLoader, TripleLoader
from hetu.models import knowledge
from hetu.ps import Client, ServerProcess
from hetu.strategies import Connected, Hybrid

from .test_hybrid import job

ENTITIES, RELATIONS, GROUP, OTHERS, EPOCHS = 400, 10, 8, 8, 2
ENTITY_LINES, RELATION_LINES, FOREVER = 20, 5, 1 << 20
AHEAD = {"lru": 1, "constant": 20, "dynamic": 6}


def drawn(rng: np.random.Generator, count: int, n: int) -> np.ndarray:
    odds = 1 / np.arange(1.0, count + 1)
    return rng.choice(count, n, p=odds / odds.sum())


def triples() -> TripleLoader:
    rng = np.random.default_rng(0)
    parts = [drawn(rng, count, 640) for count in (ENTITIES, RELATIONS, ENTITIES)]
    batches = DataLoader(ArrayDataset(*parts), batch_size=32, shuffle=True)
    weights = np.bincount(np.concatenate([parts[0], parts[2]]), minlength=ENTITIES)
    return TripleLoader(batches, ENTITIES, group=GROUP, others=OTHERS, weights=weights)


def trained(client: Client, comm: dist.Comm, policy: str, ahead: int) -> ps.Counters:
    names = ("head", "relation", "tail", "heads", "tails")
    sizes = [GROUP] * 3 + [OTHERS] * 2
    inputs = [ht.placeholder(name, (None, size), "int64") for name, size in zip(names, sizes)]
    with ht.scope("model"):
        model = knowledge.Triples(ENTITIES, RELATIONS, 8, knowledge.distmult, name="graph")
        head, relation, tail = model.vectors(*inputs[:3])
        false = ht.embedding(model.entities, inputs[3]) * ht.embedding(model.entities, inputs[4])
        loss = ht.mean(ht.softplus(-model.scores(head, relation, tail))) + ht.mean(ht.square(false))
    rows = {"*relations": RELATION_LINES, "*entities": ENTITY_LINES}
    cache = ps.Cache(policy, rows, FOREVER, 0, ahead)
    strategy = Hybrid(served=["*entities", "*relations"], cache=cache)
    graphs = {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}
    ex = ht.Executor(graphs, strategy=strategy, comm=Connected(comm, client))
    ht.fit(ex, triples(), epochs=EPOCHS, inputs=inputs, progress=False)
    assert ex.placement.ahead == (ahead if policy == "dynamic" else 1)  # or `fit` would hold epoch after epoch
    return ex.placement.comm.rows.counters


def distinct(rank: int) -> list[set[int]]:
    """The rows that a rank looks up in each step, the relations' behind those of the entities."""
    loader, steps = triples(), []
    for _ in range(EPOCHS):
        for batch in loader:
            head, relation, tail, heads, tails = (part[2 * rank : 2 * rank + 2].ravel() for part in batch)
            steps.append({*head, *tail, *heads, *tails, *(relation + ENTITIES)})
    return steps


def counted(steps: list[set[int]], choices: dict[int, list[set[int]]]) -> int:
    """The rows that are pulled if none is kept at first, and before some steps it is chosen by others which to keep."""
    held, known, pulled = set[int](), set[int](), 0
    for number, step in enumerate(steps):
        if number in choices:
            uses = Counter(row for coming in choices[number] for row in coming)
            saved = {row: uses[row] - (row not in held) for row in uses.keys() | held}
            order = sorted(saved, key=lambda r: (-saved[r], r not in held, r))
            held = {*[r for r in order if r < ENTITIES][:ENTITY_LINES]}
            held |= {*[r for r in order if r >= ENTITIES][:RELATION_LINES]}
            known &= held
        pulled += len(step - known)
        known |= step & held
    return pulled


@functools.cache
def found(policy: str, ahead: int) -> list[ps.Counters]:
    return job(2, lambda client, comm: trained(client, comm, policy, ahead), kind=ServerProcess)


def test_what_is_pulled_is_what_a_count_of_ids_says():
    """With copies that never grow old. `fit` sees to the end of an epoch, so the first step of each is not foreseen."""
    for rank in range(2):
        steps = distinct(rank)
        epoch = len(steps) // EPOCHS
        ends = range(epoch, len(steps) + 1, epoch)
        dynamic = {k: steps[k : min(k + 6, end)] for end in ends for k in range(end - epoch + 1, end, 6)}
        for policy, choices in (("dynamic", dynamic), ("constant", {1: steps[1:epoch]})):
            seen = found(policy, AHEAD[policy])[rank]
            assert (seen.unique, seen.fetched) == (sum(map(len, steps)), counted(steps, choices)), policy


def test_who_knows_the_coming_batches_pulls_less():
    made = {policy: found(policy, ahead) for policy, ahead in AHEAD.items()}
    for rank in range(2):
        lru, constant, dynamic = (made[policy][rank].hit_rate for policy in AHEAD)
        assert 0 < lru < constant < dynamic
        assert dynamic > 1.3 * lru
