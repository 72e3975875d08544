# %% [markdown]
# # 4. Passes, memory and the program
#
# **After this notebook you can** write a pass that rewrites graphs, read the program that really runs, see where
# every value lies in memory, and cut a model's memory by more than half without changing a result.

# %%
import time

import numpy as np

import hetu as ht
from hetu.passes import PASSES, simplify
from hetu.teach.device import best_device
from hetu.teach.try_it import try_it

device = best_device()  # "gpu" where there is one, else "cpu"

# %% [markdown]
# ## A pass takes a graph and returns a graph
#
# You write a graph for readers; the machine wants one to run. *Passes* turn the first into the second. The first pass
# is `simplify`: it computes constants, merges equal nodes, and drops nodes that do nothing. Here is a graph with
# something for each of the three:

# %%
x = ht.placeholder("x", (None, 8))
y = ht.exp(x * 1 + 0) + ht.exp(x) * (2 * ht.constant(0.5))
ht.Graph([y])

# %%
ht.Graph(simplify([y]))

# %% [markdown]
# Eight boxes became three. `x * 1 + 0` is `x`; 2 * 0.5 is 1, and times 1 is nothing. Then both `exp` are the same
# operator on the same input, so they are one node. Each step made the next one possible.
#
# **Try it:** how many boxes are left of `ht.tanh(x) * ht.tanh(x * 1)`? The placeholder is one.

# %%
try_it(None, lambda: len(ht.Graph(simplify([ht.tanh(x) * ht.tanh(x * 1)])).nodes), "which nodes become equal?")

# %% [markdown]
# ## Write one yourself
#
# `ht.rewrite` rebuilds a graph from inputs to outputs and asks your rule about each node. The rule returns a
# replacement, or `None` to keep the node. It sees the old node and its *new* inputs. This rule removes logarithms of
# exponentials:


# %%
def drop_log_of_exp(outputs):
    def rule(node, inputs):
        if node.op.name == "log" and inputs[0].op.name == "exp":
            return inputs[0].inputs[0]
        return None

    return ht.rewrite(outputs, rule)


z = ht.tanh(ht.log(ht.exp(ht.log(ht.exp(x)))) * 2)
print(ht.Graph(drop_log_of_exp([z])))

(shorter,) = drop_log_of_exp([z])
numbers = np.random.default_rng(0).normal(size=(1000, 8))
difference = np.abs(ht.evaluate(z, {x: numbers}) - ht.evaluate(shorter, {x: numbers}))
print("largest difference on random numbers:", difference.max())

# %% [markdown]
# Both pairs are gone in one walk. The results are equal up to rounding, as they must be: a pass never changes a
# result. (But where the original overflows this one improves it: `exp(100)` is not a float32. A pass that takes such a
# liberty should say so in its first lines.)
#
# An executor applies all passes of this table, in this order. Add yours, and it is part of the system. You can choose
# passes by name, so a suspect is found quickly:

# %%
PASSES["drop_log_of_exp"] = drop_log_of_exp
print(*PASSES, sep="\n")

# %% [markdown]
# **Try it:** what does `ht.log(ht.exp(x))` give at 100, without your pass?

# %%
try_it(None, lambda: ht.evaluate(ht.log(ht.exp(x)), {x: np.full((1, 8), 100)})[0, 0], "`float('inf')` is a number, too")

# %% [markdown]
# ## The program
#
# After the passes, hetu lays the graph out for one device and one set of shapes. Here is a small training step:

# %%
w = ht.variable("w", ht.init.normal(), (8, 4))
loss = ht.mean(ht.tanh(x @ w) ** 2)
(dw,) = ht.gradients(loss, [w])
print(ht.Executor([loss, {w: w - 0.1 * dw}]).program({x: numbers[:100]}))

# %% [markdown]
# This flat list is what runs. Each line gives an operator, its type, its *place*, and the values that are dead after
# it. ([Names in a program](README.md#names-in-a-program) may be longer than yours.) The place is an address in one
# block of memory, the *arena*; or `in place`, over an operand; or `-> name`, the new value of a variable, written
# straight over the old one.
#
# Now a model large enough to matter: eight layers in four blocks of two.


# %%
def block(h):
    for _ in range(2):
        h = ht.nn.Linear(64, 64, activation=ht.gelu)(h)
    return h


def training_step(blocks):
    with ht.scope("model"):
        rows = h = ht.placeholder("rows", (512, 64))
        for each in blocks:
            h = each(h)
        loss = ht.mean(h**2)
        return [loss, ht.optim.SGD(0.1).minimize(loss)], {rows: np.ones((512, 64))}


step, feed = training_step([block] * 4)
executor = ht.Executor(step, device=device)
program = executor.program(feed)

# %% [markdown]
# Every line of a program is already bound to its arrays. A step is only this loop, so hardly any time passes between
# two operators. Run it by hand:

# %%
executor.run(feed)  # puts the rows into the place where the first instruction reads them
start = time.perf_counter()
for call in program.calls:
    call()
print(f"{len(program.calls)} calls, {1e3 * (time.perf_counter() - start):.1f} ms")

# %% [markdown]
# **Try it:** where does the small program above put the new value of `w`? Answer "arena" or "variable".

# %%
try_it(None, b"InZhcmlhYmxlIg==", "look at the place of its last line")

# %% [markdown]
# ## Memory, drawn
#
# In a notebook, a program displays its memory plan. Time runs to the right, one instruction after the other; height
# is the address. A rectangle is a value: it begins when the value is computed and ends after its last read.

# %%
program

# %% [markdown]
# See the staircase? The forward pass piles up values for the backward pass, which takes them down in the opposite
# order. The peak is in the middle. Now without reuse, where every value keeps its own place for the whole step:

# %%
wasteful = ht.Executor(step, reuse=False, device=device).program(feed)
print(f"{wasteful.plan.arena_bytes / program.plan.arena_bytes:.1f} times the memory")
wasteful

# %% [markdown]
# How does the planner know when a value is dead? It knows the whole list before the first step, so it knows the last
# line that reads each value. A system that runs operators as they are called cannot know that.
#
# **Try it:** how many bytes high are the tall rectangles, values of 512 rows of 64 numbers?

# %%
try_it(None, lambda: np.ones((512, 64), "f").nbytes, "a float32 has 4 bytes")

# %% [markdown]
# ## Trade time for memory
#
# The staircase is as high as the model is deep. But gradients are graphs: a value need not be kept if it is computed
# *again* for the backward pass ([T. Chen et al., 2016](https://arxiv.org/abs/1604.06174)). `ht.recompute` marks a
# block whose insides are not kept.

# %%
saving_step, _ = training_step([ht.recompute(block)] * 4)
saving_executor = ht.Executor(saving_step, device=device)
saving = saving_executor.program(feed)
for name, each in {"kept": program, "recomputed": saving}.items():
    print(f"{name:11} {len(each.steps)} instructions, {each.plan.arena_bytes:>9,} bytes")
more, left = len(saving.steps) / len(program.steps) - 1, saving.plan.arena_bytes / program.plan.arena_bytes
print(f"{more:.0%} more instructions, {left:.0%} of the memory")
saving

# %% [markdown]
# The forward pass now keeps only one value per block (yellow). The backward pass makes the insides of each block
# again; they live briefly and make room for those of the next (blue). And the numbers are the same:


# %%
def losses(*arguments, **options):
    executor = ht.Executor(*arguments, device=device, **options)
    return [executor.run(feed)[0].item() for _ in range(3)]


print(losses(step), losses(step) == losses(saving_step))
print(losses(step, passes=[]), "without any pass")

# %% [markdown]
# With recomputation the losses are the same to the last bit. Without the passes they agree up to rounding; a fused
# operator may change no more than that.
#
# **Try it:** put all eight layers into *one* `recompute`. Is the peak lower than with four? Answer True or False; draw
# it before you run it.


# %%
def all_layers(h):
    return block(block(block(block(h))))


def peak(blocks):
    return ht.Executor(training_step(blocks)[0], device=device).program(feed).plan.arena_bytes


try_it(
    None, lambda: peak([ht.recompute(all_layers)]) < saving.plan.arena_bytes, "what is there when all is made again?"
)

# %% [markdown]
# **What to remember.** *Build, rewrite, run.* A pass is a pure function from graph to graph. A program is a flat list
# of bound calls in one block of memory. Everything known before the first step (types, order, lifetimes) costs
# nothing in the millionth. In labs 3 and 4 you fold constants and compute a peak by hand.
#
# Next: [training for real](05_training_for_real.ipynb).
