"""What has to hold on a GPU, as functions: for `test_device.py` on a device, for `test_check.py` on the stand-in."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu import nn
from hetu.backend import Device, host_empty, to_numpy
from hetu.dist import SerialComm, world
from hetu.dist.nccl import NCCLComm
from hetu.graph import topological
from hetu.interpret import interpret

from ..dist.contract import CHECKS
from ..dist.test_nccl import OnDevice

STEPS = 5
RNG = np.random.default_rng(0)
X, T = RNG.standard_normal((STEPS, 8, 6)).astype("float32"), RNG.integers(0, 5, (STEPS, 8))


def operator(sample) -> None:
    """Every node of a row, bound on the device as a program binds it, gives what it gives in NumPy."""
    xp = Device("gpu").xp
    arrays = sample.arrays()
    nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
    built = sample.build(*nodes)
    order = topological(built if isinstance(built, tuple | list) else (built,))
    wanted = dict(zip(order, interpret(order, dict(zip(nodes, arrays)))))
    for node in order:
        if node.inputs and node.op.name != "item":
            inputs = [on_host(xp, wanted[i]) if i.op.on_host else on_device(xp, wanted[i]) for i in node.inputs]
            for got, value in zip(computed(xp, node, inputs), parts(wanted[node]), strict=True):
                np.testing.assert_allclose(to_numpy(got), value, rtol=1e-7, atol=1e-9, err_msg=repr(node))


def parts(value):
    return value if isinstance(value, tuple) else (value,)


def on_device(xp, value):
    return (
        tuple(xp.asarray(np.asarray(v)) for v in value) if isinstance(value, tuple) else xp.asarray(np.asarray(value))
    )


def on_host(xp, value):
    """A copy where a GPU reads by itself."""
    host = host_empty(xp, value.nbytes).view(value.dtype).reshape(value.shape)
    np.copyto(host, value)
    return host


def computed(xp, node, inputs):
    if node.op.view_rule is not None and (view := node.op.view_rule(xp, *inputs, **node.attrs)) is not None:
        return (view,)
    types = parts(node.type)
    made = [np.full(t.shape, 77, t.dtype) for t in types]
    outs = tuple(on_host(xp, m) if node.op.on_host else on_device(xp, m) for m in made)
    for call in node.op.bound(xp, outs if isinstance(node.type, tuple) else outs[0], inputs, node.attrs):
        call()
    xp.cuda.get_current_stream().synchronize()
    return outs


def model(noise=None):
    """A linear layer with dropout, its loss, and an optimizer whose rate changes with the step."""
    with ht.scope("model"):
        x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
        h = ht.dropout(nn.Linear(6, 5)(x), 0.3)
        loss = ht.mean(ht.softmax_cross_entropy(h if noise is None else h + noise(h), t))
        return loss, ht.optim.Adam(ht.schedules.cosine(1e-2, 10)).minimize(loss)


def trained(entries, device, fetch=True, **options):
    """(losses, variables, executor) after some steps."""
    executor = ht.Executor([e for e in entries if fetch or not isinstance(e, ht.Node)], device=device, **options)
    losses = [executor.run({"x": x, "t": t}) for x, t in zip(X, T)]
    return [float(row[0]) for row in losses if fetch], dict(executor.state), executor


def assert_equal(one, other) -> None:
    assert one[1].keys() == other[1].keys()
    np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
    for name, value in one[1].items():
        np.testing.assert_allclose(value, other[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def captured_training() -> None:
    entries = model()
    there = trained(entries, "gpu")
    assert_equal(trained(entries, "cpu"), there)
    assert there[2].program({"x": X[0], "t": T[0]}).captured.graph is not None


def precision(dtype: str) -> None:
    entries = model()
    losses, state, executor = trained(entries, "gpu", precision=dtype)
    np.testing.assert_allclose(losses, trained(entries, "cpu")[0], rtol=3e-2)
    assert state.get("loss_scale/good_steps", STEPS) == STEPS
    assert executor.program({"x": X[0], "t": T[0]}).captured.graph is not None


def attention(precision: str) -> None:
    """A causal block whose attention takes several tiles, with heads for tensor cores, learns as it does on the CPU."""
    with ht.scope("block"):
        x = ht.placeholder("x", (None, 70, 32))
        loss = ht.mean(ht.square(nn.TransformerBlock(32, 2, hidden=8, causal=True)(x)))
        updates = ht.optim.SGD(0.5).minimize(loss)
    feed = {x: np.random.default_rng(1).standard_normal((1, 70, 32)).astype("float32")}
    losses = {}
    for device in ("cpu", "gpu"):
        executor = ht.Executor([loss, updates], device=device, precision=precision if device == "gpu" else "float32")
        losses[device] = [float(executor.run(feed)[0]) for _ in range(2)]
    ops = {step.node.op.name for step in executor.program(feed).steps}
    assert {"flash_attention", "flash_attention_dx"} <= ops
    np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=1e-5 if precision == "float32" else 2e-2)


def nccl(*checks, host=None) -> None:
    """Checks of the contract for communicators, on one rank or those of `host`, inside a stream as in an executor."""
    device = Device("gpu")
    with device.stream():
        comm = OnDevice(NCCLComm(host or SerialComm(), device), device.xp)
        for check in checks:
            check(comm)


if __name__ == "__main__":  # one of several processes
    job = world(deadline=20.0)
    nccl(*CHECKS, host=job)
    if job.rank == 0:
        print(f"{len(CHECKS)} checks on {job.world_size} ranks of NCCLComm")
