"""What has to hold on a GPU, as functions: for `test_device.py` on a device, for `test_check.py` on the stand-in."""

from __future__ import annotations

from collections import Counter

import numpy as np

import hetu as ht
from hetu import nn
from hetu.core.backend import Device, host_empty, to_numpy
from hetu.core.graph import OPS, topological
from hetu.core.op import Role
from hetu.core.simplify import interpret
from hetu.dist import SerialComm, world
from hetu.dist.comm.nccl import NCCLComm
from hetu.gpu_kernels.capture import Captured
from hetu.look import cuda_text

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


# Numbers that the host draws.
RUN_CALL_BY_CALL = (
    "random-normal",
    "random-truncated",
    "random-randint",
    "random-gumbel",
)


def captured_operator(sample) -> None:
    """Every node of a row, recorded as a graph, gives in a replay what its calls gave one by one."""
    xp = Device("gpu").xp
    arrays = sample.arrays()
    nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
    built = sample.build(*nodes)
    order = topological(built if isinstance(built, tuple | list) else (built,))
    values = dict(zip(order, interpret(order, dict(zip(nodes, arrays)))))
    refused = []
    for node in order:
        if not node.inputs or node.op.name == "item" or node.role is Role.COMMUNICATION:
            continue
        inputs = [on_host(xp, values[i]) if i.op.on_host else on_device(xp, values[i]) for i in node.inputs]
        outs = empty_outs(xp, node)
        calls = node.op.bound(xp, outs if isinstance(node.type, tuple) else outs[0], inputs, node.attrs)
        captured = Captured(xp, calls, lambda _, reason, node=node: refused.append(f"{node!r}: {reason}"))
        with Device("gpu").stream():
            captured.run()
            xp.cuda.get_current_stream().synchronize()  # for what lies in the memory of the host
            wanted = [to_numpy(o) for o in outs]
            for out in outs:
                out[...] = 77
            captured.run()
            xp.cuda.get_current_stream().synchronize()
            for got, value in zip(outs, wanted, strict=True):
                np.testing.assert_allclose(to_numpy(got), value, rtol=1e-7, atol=1e-9, err_msg=repr(node))
    if not sample.id.startswith(RUN_CALL_BY_CALL):
        assert not refused, refused


def empty_outs(xp, node):
    """Places for the results of a node, which hold something else."""
    made = [np.full(t.shape, 77, t.dtype) for t in parts(node.type)]
    return tuple(on_host(xp, m) if node.op.on_host else on_device(xp, m) for m in made)


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
    outs = empty_outs(xp, node)
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


def captured_rows(optimizer) -> None:
    """Looked-up rows, some by many, learn as on the CPU and to the last digit the same in every run."""
    with ht.scope("rows"):
        ids, t = ht.placeholder("x", (None, 40), "int64"), ht.placeholder("t", (None,), "int64")
        h = ht.mean(nn.Embedding(20, 6)(ids), axis=1)
        loss = ht.mean(ht.softmax_cross_entropy(nn.Linear(6, 5)(h), t))
        entries = [loss, optimizer.minimize(loss)]
    looked_up = (RNG.random((STEPS, 8, 40)) ** 4 * 20).astype("int64")
    feeds = [{ids: x, t: label} for x, label in zip(looked_up, T)]

    def learned(device):
        executor = ht.Executor(entries, device=device)
        losses = [executor.run(feed)[0] for feed in feeds]
        return np.array(losses), dict(executor.state), executor.program(feeds[0])

    there, again = learned("gpu"), learned("gpu")
    assert_equal(learned("cpu"), there)
    assert there[2].captured.graph is not None
    assert any(s.node.op.name.endswith("_rows") for s in there[2].steps)
    np.testing.assert_array_equal(there[0], again[0])
    for name, value in there[1].items():
        np.testing.assert_array_equal(value, again[1][name], err_msg=name)


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


def convolution(precision: str) -> Counter[str]:
    """A residual block behind a first layer of 3 channels learns as on the CPU. Returns its operators."""
    with ht.scope("block"):
        x = ht.placeholder("x", (None, 3, 6, 6))
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2, padding=1)]
        layers += [nn.Conv2d(24, 24, 3, padding=1), nn.Conv2d(16, 24, 1, stride=2)]
        h = ht.relu(layers[0](x))
        loss = ht.mean(ht.square(layers[2](ht.relu(layers[1](h))) + layers[3](h)))
        updates = ht.optim.SGD(0.1).minimize(loss)
    feed, losses = {x: np.random.default_rng(1).standard_normal((4, 3, 6, 6)).astype("float32")}, {}
    for device in ("cpu", "gpu"):
        executor = ht.Executor([loss, updates], device=device, precision=precision if device == "gpu" else "float32")
        losses[device] = [float(executor.run(feed)[0]) for _ in range(2)]
    np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=1e-5 if precision == "float32" else 2e-2)
    assert losses["gpu"][1] < losses["gpu"][0]
    return Counter(step.node.op.name for step in executor.program(feed).steps)


def normalization(precision: str) -> Counter[str]:
    """A block of convolutions with batch norms, relus and a sum learns as on the CPU. Returns its operators."""
    with ht.scope("block"):
        x, t = ht.placeholder("x", (None, 16, 6, 6)), ht.placeholder("t", (None,), "int64")
        first, second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        h = ht.relu(nn.BatchNorm(16)(first(x)))
        y = ht.relu(nn.BatchNorm(16)(second(h)) + h)
        loss = ht.mean(ht.softmax_cross_entropy(nn.Linear(16, 5)(ht.global_avg_pool2d(y)), t))
        updates = ht.optim.SGD(0.5).minimize(loss)
    feed = {x: RNG.standard_normal((8, 16, 6, 6)).astype("float32"), t: RNG.integers(0, 5, 8)}
    losses, state = {}, {}
    for device in ("cpu", "gpu"):
        executor = ht.Executor([loss, updates], device=device, precision=precision if device == "gpu" else "float32")
        losses[device] = [float(executor.run(feed)[0]) for _ in range(3)]
        state[device] = dict(executor.state)
    digits = 1e-4 if precision == "float32" else 2e-2
    np.testing.assert_allclose(losses["gpu"], losses["cpu"], rtol=digits)
    for name, value in state["cpu"].items():
        np.testing.assert_allclose(state["gpu"][name], value, rtol=digits, atol=digits, err_msg=name)
    return Counter(step.node.op.name for step in executor.program(feed).steps)


def soft(x, scale):
    """The operator of a student."""
    made = ht.op(
        name="soft",
        dims="...,...->...",
        code="y = x / (1 + fabs(x)) * scale",
    )(lambda xp, x, scale: x / (1 + xp.abs(x)) * scale)
    OPS.pop("soft")
    return made(x, scale)


def shown_kernels() -> None:
    """A program shows what was compiled for it: each text once, of an operator alone that which needs no GPU."""
    x, scale = ht.placeholder("x", (4, 8)), ht.placeholder("scale", (8,))
    alone = soft(x, scale)
    feed = {x: np.zeros((4, 8), np.float32), scale: np.zeros(8, np.float32)}
    shown = ht.Executor([soft(alone, scale)], device="gpu", passes=[]).program(feed).c
    assert shown.startswith("// of 0, 1:\nextern") and shown.count("void ") == 1
    assert cuda_text(alone).splitlines() == shown.splitlines()[1:]
    step = ht.Executor(model(), device="gpu").program({"x": X[0], "t": T[0]}).c
    assert "// update_all, which stands in hetu/gpu_kernels/update.cu\n" in step and "struct" not in step


def nccl(*checks, host=None) -> None:
    """Checks of the contract for communicators, on one rank or those of `host`, inside a stream as in an executor."""
    device = Device("gpu")
    with device.stream():
        comm = OnDevice(NCCLComm(host or SerialComm(), device), device.xp)
        for check in checks:
            check(comm)


if __name__ == "__main__":  # one of several processes
    job = world(deadline=60.0)
    nccl(*CHECKS, host=job)
    if job.rank == 0:
        print(f"{len(CHECKS)} checks on {job.world_size} ranks of NCCLComm")
