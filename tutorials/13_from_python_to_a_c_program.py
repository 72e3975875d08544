# %% [markdown]
# # 13. From ten lines of Python to a C program
#
# **After this notebook you can** read the C that hetu makes of a training step, say what became of each operator, and
# take a trained model away as one C file that runs where there is no Python.
#
# This needs a C compiler (`cc`, or `pip install "hetu-dl[cc]"`). Without one NumPy computes the same; the cells that
# show C say so and go on.

# %%
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.cpu_kernels.compiler import compiler
from hetu.teach.try_it import try_it

cc = compiler()
print("C compiler:", "found" if cc else "none, cells with C are skipped")

# %% [markdown]
# ## Ten lines
#
# A network with one hidden layer learns to read digits. Count the lines:

# %%
image = ht.placeholder("image", (None, 784))
digit = ht.placeholder("digit", (None,), "int64")
hidden = ht.nn.Linear(784, 32, activation=ht.relu, name="hidden")(image)
scores = ht.nn.Linear(32, 10, name="out")(hidden)
loss = ht.mean(ht.softmax_cross_entropy(scores, digit))
subgraphs = {"train": [loss, ht.optim.SGD(0.3).minimize(loss)], "eval": [ht.softmax(scores)]}
executor = ht.Executor(subgraphs, seed=0)
for _ in range(5):
    for images, digits in ht.data.DataLoader(ht.data.mnist("train").flat(), 50, shuffle=True, seed=0):
        executor.run("train", {image: images, digit: digits})

test_images, test_digits = ht.data.mnist("test").flat().arrays
guesses = executor.run("eval", {image: test_images})[0].argmax(axis=1)
print(f"{np.mean(guesses == test_digits):.1%} of {len(guesses)} digits are read right")

# %% [markdown]
# **Try it:** how many numbers has the network learned?

# %%
try_it(None, b"MjU0NTA=", "weights and biases of both layers")

# %% [markdown]
# ## Operators become groups
#
# You wrote two products, two biases, a relu and a softmax, which by itself is five operators: the largest score,
# subtract it, exp, sum, divide. The program of `eval` has four instructions.
#
# A matrix product takes time because it computes much. The others compute little; their time goes into *moving*
# numbers: ten operators, one after the other, carry an array ten times from memory and back. So a pass puts neighbors
# into a **group**: what is computed in between never goes to memory. A group is an operator like any other, `fused`,
# with an attribute: its *form*, a list of lines. Values are numbered, first the arrays that the group reads:

# %%
first = {image: test_images[:100]}
program = executor.program("eval", first)
print(program)
forms = [step.node.attrs["form"] for step in program.steps if step.node.op.name == "fused"]
for form in forms:
    read = [f"v{k}" for k in range(len(form.types))]
    print("read", *read, "\n ", form.text(read).replace("; ", "\n  "))

# %% [markdown]
# **Try it:** how many times would ten operators, one after the other, read or write an array? And as one group? Answer
# with the first number divided by the second.

# %%
try_it(None, b"MTA=", "ten times there and back, or once")

# %% [markdown]
# ## Groups become C
#
# `print(program.c)` shows all functions that were compiled for the program. We look at pieces:


# %%
def show(text, first, last, most=48):
    """Print a text from the first line that has `first` in it to the next that has `last` in it."""
    if not cc:
        print("skipped: there is no C compiler")
        return
    found = re.search(rf"^[^\n]*{re.escape(first)}.*?{re.escape(last)}[^\n]*$", text, re.MULTILINE | re.DOTALL)
    lines = found[0].splitlines()
    for line in lines[:most]:
        line = line.rstrip(" \\-")
        print(line if len(line) < 110 else line[:106] + " ...")
    print(f"... {len(lines) - most} more lines\n" if len(lines) > most else "")


functions = re.findall(r"^void group\(.*?^}", program.c, re.MULTILINE | re.DOTALL)
with_relu, with_softmax = (functions + ["", ""])[:2]
show(with_relu, "void", "\n}")

# %% [markdown]
# Read it from the inside. `v0` and `v1` are what the group reads, `v2` and `v3` its two lines; a comment names the
# operator. Such names cost nothing: the compiler keeps the numbers in registers, those of 8 or 16 columns at once. (It
# dares to, as `EACH` tells it that no column needs another.)
#
# Around that is a loop over rows, from `first` to `last`. Rows are the *jobs* of this function: nobody says who does
# which, so threads can divide them. Sizes and strides come as arguments. The last batch of an epoch, which is smaller,
# needs no other function: *a new shape compiles nothing*.
#
# The bias `x1` moves with the column only. Broadcasting is no operator here and copies nothing: it is an index that is
# missing.
#
# **Try it:** a last batch of 30 rows comes. How many functions are compiled for it?

# %%
try_it(None, b"MA==", "sizes come as arguments")

# %% [markdown]
# ## A softmax has three phases
#
# A row's largest score is known only at the end of the row. So what needs it belongs to a *second* loop over the same
# row, and what needs the sum to a third. These are the *phases* of a group. Here they are, and the first of them in C:

# %%
for line, value in zip(form.lines, form.values()[len(form.types) :]):
    print(f"phase {value.phase}: {line.op.name}")
show(with_softmax, "for (long long j = 0", "\n            }", most=30)

# %% [markdown]
# The inner loop goes over *rows*: `l` is one of 32 that were turned beforehand, so that the scores of a column lie
# side by side. A row of ten scores alone would leave most of a vector empty. What is one number per row, such as
# `r3`, is an array. Rows of 128 columns and more stay as they lie; there number j of a row goes to *lane* j mod 32 of
# a sum, and at the end the lanes are halved, five times.
#
# Why say such things? A sum of floats depends on its order, so a compiler keeps to the order that you wrote, and one
# running total would be a slow loop, number after number. Columns in order for 32 rows at once, or 32 lanes: that
# *is* an order, and one that vectors of 4, 8 or 16 numbers can follow. So gcc and clang, old CPUs and new ones, one
# thread and eight give the same bits.
#
# **Try it:** to which lane does number 70 of a row go?

# %%
try_it(None, b"Ng==", "j mod 32")

# %% [markdown]
# ## The step becomes a table
#
# What a compiled function needs to know stands in a block of 8-byte words: addresses, sizes, strides. All are known
# before the first step, so a step is a table. Each row has a function, its block, and how many jobs there are:

# %%
for step in program.steps:
    for call in step.calls:
        row = f"{call.function:6} {len(call.words):3} words {call.jobs:4} jobs" if cc else "a call of NumPy: "
        print(row, " ", step.node.op.name)
print("calls from Python:", len(program.calls))

# %% [markdown]
# Python makes *one* call per step: "walk through this table". An operator without C, such as your own without `code=`,
# is still called from Python and cuts the table in two.
#
# **Try it:** how many calls from Python has a step whose third of five instructions is such an operator?

# %%
try_it(None, b"Mw==", "a table, the operator, a table")

# %% [markdown]
# ## Take it away
#
# Functions, a table, memory and numbers: that is all there is to a step, and nothing of it is Python. `export_c` writes
# them into one file, with a `main` around them.

# %%
folder = tempfile.TemporaryDirectory()
text = ""
if cc:
    path = executor.export_c("eval", folder.name, first)
    text = path.read_text("utf-8")
    for file in sorted(Path(folder.name).iterdir()):
        print(f"{file.name:12} {file.stat().st_size:>8,} bytes")
show(text, "// eval", "#include")

# %% [markdown]
# Now read it from top to bottom. First come functions, as those of the C library take one number at a time. This is
# e to the power of x: x is split into n times log 2 and a small rest. 2 to the power of n is written into the bits of a
# float, and for the rest a polynomial of a few terms is exact enough.
#
# Then the functions. You know the groups. When Python runs them, products call a library for linear algebra; the file
# depends on nothing, so it has plain loops under the same names:

# %%
show(text, "// 2^n for n", "// Near 0 a")
show(text, "##gemm(", "    }  ")

# %% [markdown]
# Then what walks through the table. Threads divide the jobs of a row where that pays. In `doubt` a function says that
# it met something to look at, such as a label out of range.
#
# And the memory: the arena of [notebook 4](04_passes_memory_and_the_program.ipynb), what is fed, the variables, and
# constants. Last the step. Compare it with `print(program)` above: the same places.

# %%
show(text, "long long worth = several", "*row->doubt")
show(text, "// -- memory", "\n};")

# %% [markdown]
# `main` reads the inputs, walks and prints. Behind it stand the weights that we trained, as numbers.

# %%
show(text, "int main", "\n}")
show(text, "// -- numbers", "_bias")

# %% [markdown]
# **Try it:** how many bytes do the weights of the hidden layer take, without its bias?

# %%
try_it(None, b"MTAwMzUy", "a float has 4 bytes")

# %% [markdown]
# ## Run it without Python
#
# The first lines of the file say how to compile it. The program reads images from a file: first those that we fed when
# we exported it, then others. Its probabilities are not Python's to the last bit, as plain products add in another
# order than the library.


# %%
def run_c(name, steps):
    """Compile a program of the folder and run it: a list of numbers for each line that it prints."""
    if not cc:
        print("skipped: there is no C compiler")
        return []
    command = [*cc.command, f"{name}.c", "-o", name, "-lm", "-lpthread"]
    subprocess.run(command, cwd=folder.name, check=True)
    command = [os.path.join(folder.name, name), f"{name}.inputs", str(steps)]
    lines = subprocess.run(command, cwd=folder.name, check=True, capture_output=True, text=True).stdout.splitlines()
    return [[float(number) for number in line.split(":")[1].split()] for line in lines]


for numbers in run_c("eval", 1):
    by_c, by_python = np.reshape(numbers, (100, 10)), executor.run("eval", first)[0]
    print("by C:  ", by_c.argmax(axis=1)[:30])
    print("truth: ", test_digits[:30])
    print(f"by Python the probabilities differ by {np.abs(by_c - by_python).max():.1e} at most")

(Path(folder.name) / "eval.inputs").write_bytes(test_images[500:600].tobytes())
for numbers in run_c("eval", 1):
    right = np.reshape(numbers, (100, 10)).argmax(axis=1) == test_digits[500:600]
    print(f"{right.sum()} of 100 others are read right")

# %% [markdown]
# **Try it:** how many bytes has the file of 100 images that the program reads?

# %%
try_it(None, lambda: test_images[500:600].nbytes, "784 numbers each")

# %% [markdown]
# ## Training is a program, too
#
# Gradients are graphs and updates are operators, so a training step can be taken away like any other. Here are five
# steps on one batch, in C and in Python, both from the weights of this moment:

# %%
batch = {image: test_images[:50], digit: test_digits[:50]}
if cc:
    executor.export_c("train", folder.name, batch)
for line in run_c("train", 5):
    print(f"loss by C: {line[0]:.6f}   by Python: {executor.run('train', batch)[0].item():.6f}")
folder.cleanup()

# %% [markdown]
# **Try it:** how many variables does the program of `train` write in a step? Then export it and look for the gradient
# of the cross entropy: how many loops does it take? And fetch `ht.argsort(scores)` in `eval`, too: what does the error
# say?

# %%
try_it(None, b"NA==", "weights and biases of two layers; SGD keeps nothing else")

# %% [markdown]
# **What to remember.** A group is neighboring operators in one loop; what lies between them never reaches memory. A
# step is a table of functions and blocks of words, and one call walks through it. All that is known before the first
# step is fixed in that table. So it can leave Python behind.
#
# Next: [reading a profile](14_reading_a_profile.ipynb).
