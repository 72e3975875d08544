"""Which GPU each rank takes where a host has two: `heturun -w 3 python -m tests.dist.gpus`."""

from __future__ import annotations

import hetu as ht
from hetu.core.backend import Device
from hetu.dist import local_rank, world

from ..gpu import fake_cupy

if __name__ == "__main__":
    told = local_rank()
    with fake_cupy.installed() as cupy:
        cupy.cuda.runtime.getDeviceCount = lambda: 2
        parsed = [str(Device.parse(text)) for text in ("gpu", "gpu:1", "cpu")]
        comm = world(deadline=60.0)
        executor = ht.Executor([ht.variable("w", [1.0]) * 2], device="gpu", comm=comm)
        print(f"rank {comm.rank}: {told} {local_rank()} {' '.join(parsed)} {executor.device}")
