"""One rank of PyTorch's DistributedDataParallel (gloo) on the benchmark's MLP; parallel.py starts several.

It prints the global losses of the first four steps and the median time of later ones, as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from rows import WORKLOADS
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from workloads import Workload


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    workload = WORKLOADS["mlp_sgd"]
    parallel = DistributedDataParallel(mlp(workload))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=workload.rate, fused=True)
    parts = [{k: torch.from_numpy(v).chunk(size)[rank] for k, v in batch.items()} for batch in workload.batches()]
    batches = itertools.cycle(parts)

    def step() -> torch.Tensor:
        batch = next(batches)
        loss = F.cross_entropy(parallel(batch["x"]), batch["t"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [global_mean(step()) for _ in range(4)]
    for _ in range(20):
        step()
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        step().item()
        times.append(time.perf_counter() - begin)
    dist.barrier()
    if rank == 0:
        print(json.dumps({"losses": losses, "s": statistics.median(times)}))
    dist.destroy_process_group()


def mlp(workload: Workload) -> nn.Module:
    """The model with the initial weights; torch stores matrices as (out, in)."""
    layers: list[nn.Module] = []
    matrices = [torch.from_numpy(w) for name, w in workload.weights().items() if name.endswith("weight")]
    biases = [torch.from_numpy(b) for name, b in workload.weights().items() if name.endswith("bias")]
    for matrix, bias in zip(matrices, biases):
        layers += [nn.Linear(*matrix.shape), nn.ReLU()]
        with torch.no_grad():
            layers[-2].weight.copy_(matrix.T)
            layers[-2].bias.copy_(bias)
    return nn.Sequential(*layers[:-1])


def global_mean(loss: torch.Tensor) -> float:
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
