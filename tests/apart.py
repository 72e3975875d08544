"""The passes after which operators are instructions of their own, for tests that count them."""

from __future__ import annotations

from hetu.core.passes import is_last
from hetu.passes import PASSES, chosen_passes

APART = [name for name, run in PASSES.items() if run in chosen_passes(None, "cpu") and not is_last(run)]
