"""Rows for copies to the memory of the host and back, which change nothing."""

from __future__ import annotations

from hetu.plan.memory.swap import from_host, to_host

from . import Sample, real


def there_and_back(x, after):
    return from_host(to_host(x), after)


SAMPLES = [
    Sample(name, there_and_back, (real(2, 3), real(4)), lambda x, after: x, order=0)
    for name in ("to_host", "from_host")
]
