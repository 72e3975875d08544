"""Write Shakespeare with a mixture of experts, by one of six gates: `python examples/experts/train.py`.

Several ranks can share the experts, and tokens travel to them and back: `heturun -w 4 python examples/experts/train.py
--strategy ep`. Ignored on purpose: samples of what it writes, see `examples/nlp`.
"""

from __future__ import annotations

from functools import partial

import hetu as ht
from hetu import nn
from hetu.models.experts import gpt_of_experts
from hetu.script import Script, number, positive

HOT, COLD = 2.0, 0.05  # temperatures of the dense gate, at first and in the end


def gates(features: int, experts: int, steps: int) -> dict[str, partial]:
    """What makes each gate, by name, for a training of so many steps."""
    cooling = ht.schedules.exponential(HOT, COLD / HOT, every=steps)
    return {
        "switch": partial(nn.TopKGate, features, experts),
        "top2": partial(nn.TopKGate, features, experts, k=2),
        "prototypes": partial(nn.PrototypeGate, features, experts, k=2),
        "hash": partial(nn.HashGate, experts),
        "balanced": partial(nn.BalancedGate, features, experts),
        "groups": partial(nn.GroupGate, features, experts, groups=2),
        "dense_to_sparse": partial(nn.DenseToSparseGate, features, experts, temperature=cooling),
    }


def main() -> None:
    script = Script(__doc__, epochs=2, batch_size=32, learning_rate=3e-3)
    numbers = {"type": positive, "metavar": "N"}
    script.add("--gate", choices=gates(1, 2, 1), default="switch", help="(%(default)s)")
    script.add("--experts", default=4, help="(%(default)s)", **numbers)
    script.add("--features", default=64, help="(%(default)s)", **numbers)
    script.add("--layers", default=2, help="(%(default)s)", **numbers)
    script.add("--length", default=32, help="characters of context (%(default)s)", **numbers)
    script.add("--balance", type=number, default=0.01, metavar="SHARE", help="of the gates' loss (%(default)s)")
    script.only("--balance", gate=("switch", "top2", "prototypes", "groups", "dense_to_sparse"))  # which have one
    options = script.parse()
    train, test = (script.first(ht.data.shakespeare(part)) for part in ("train", "test"))
    batches = script.batches(train.windows(options.length, stride=options.length), drop_last=True)

    x = ht.placeholder("x", (None, options.length), "int64")
    t = ht.placeholder("t", (None, options.length), "int64")
    gate = gates(options.features, options.experts, options.epochs * len(batches))[options.gate]
    capacity = None if options.gate == "dense_to_sparse" else 1.25
    sizes = {name: getattr(options, name) for name in ("features", "layers", "experts")}
    y, balance = gpt_of_experts(x, len(train.vocabulary), gate, capacity=capacity, **sizes)
    nats = ht.mean(ht.softmax_cross_entropy(y, t))
    updates = ht.optim.Adam(script.rate(batches), clip_norm=1.0).minimize(nats + options.balance * balance)

    executor = script.executor({"train": [nats, updates], "eval": [nats]})
    windows = test.windows(options.length, stride=options.length)
    windows = ht.data.DataLoader(windows, min(64, len(windows)), drop_last=True)
    history = script.fit(executor, batches, inputs=(x, t), validate=("eval", windows))
    script.say(f"{options.gate} on shakespeare: {history['val_loss'][-1]:.4f} nats a character held out")


if __name__ == "__main__":
    main()
