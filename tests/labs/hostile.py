"""Submissions that know everything and solve nothing.

`{ROOT}` is the checkout, `{SITE}` where packages are installed, `{TMP}` a folder with a file `kept`.
"""

from __future__ import annotations

# What each defines besides, so that checks find what they call.
CLASS = "class Instruction(tuple):\n    def __new__(cls, *parts):\n        return tuple.__new__(cls, parts)\n"
NAMES = "last_use = peak_bytes = peak_in_place = answer\n"

HOSTILE = {
    "prints that it passed": "def answer(*a):\n    print('10 of 10 points', flush=True)\n    return True",
    "ends with code 0 when loaded": "import os\nos._exit(0)",
    "ends with code 0 when called": "import os\ndef answer(*a):\n    os._exit(0)",
    "exits": "import sys\ndef answer(*a):\n    sys.exit(0)",
    "raises what nobody catches": "def answer(*a):\n    raise GeneratorExit",
    "patches NumPy": (
        "import numpy as np\nnp.allclose = np.array_equal = lambda *a, **k: True\n"
        "np.asarray = lambda *a, **k: np.zeros(())\ndef answer(*a):\n    return 0"
    ),
    "patches the grader": (
        "import sys\nsys.path += ['{ROOT}', '{SITE}']\nfrom hetu.teach.labs import checks\n"
        "checks.different = lambda *a, **k: ''\ndef answer(*a):\n    return 0"
    ),
    "imports the reference": "import sys\nsys.path.insert(0, '{ROOT}/tutorials/labs')\nfrom lab4_liveness import *",
    "reads the reference": "exec(open('{ROOT}/tutorials/labs/lab4_liveness.py').read())",
    "reads the hidden cases": (
        "text = open('{ROOT}/tutorials/labs/checks/lab4_liveness.py').read()\n"
        "def answer(*a):\n    return eval(text and '0')"
    ),
    "looks for the reference": (
        "import glob, os\nfound = [p for top in ('/tmp', '/root', '/home', '/work') for p, _, names in os.walk(top)"
        " if 'lab4_liveness.py' in names]\nexec(open(found[0] + '/lab4_liveness.py').read())"
    ),
    "knows the examples": (
        "KNOWN = [{'a': 3, 'b': 2, 'c': 3, 'd': 3}, {'a': 1, 'b': 3, 'c': 3, 'd': 3}, {'a': 0, 'b': 1}]\n"
        "def last_use(program, results):\n"
        "    return KNOWN[2 if len(program) == 2 else len(program[3][2]) < 2]\n"
        "def peak_bytes(program, results):\n"
        "    return {0: 0, 9: 48}.get(len(program), 35 if len(program) == 4 and len(program[3][2]) == 2 else 30)\n"
        "def peak_in_place(program, results):\n"
        "    return 8 if len(program) == 4 else 12 if len(program) == 2 else 16"
    ),
    "writes answers to every pipe": (
        "import os, struct\nframe = b'L' + struct.pack('<I', 2) + b'S' + struct.pack('<I', 5) + b'value' + b'T'\n"
        "def answer(*a):\n"
        "    for fd in range(3, 40):\n"
        "        try:\n            os.write(fd, struct.pack('<Q', len(frame)) + frame)\n"
        "        except OSError:\n            pass\n    return 0"
    ),
    "writes rubbish to every pipe": (
        "import os\nfor fd in range(3, 40):\n    try:\n        os.write(fd, b'\\xff' * 64)\n"
        "    except OSError:\n        pass\ndef answer(*a):\n    return 0"
    ),
    "closes every pipe": "import os\ndef answer(*a):\n    os.closerange(0, 100)",
    "answers from a thread, before it is asked": (
        "import os, struct, threading\n"
        "frame = b'L' + struct.pack('<I', 2) + b'S' + struct.pack('<I', 5) + b'value' + b'F'\n"
        "def flood():\n    while True:\n        os.write(4, struct.pack('<Q', len(frame)) + frame)\n"
        "threading.Thread(target=flood, daemon=True).start()\ndef answer(*a):\n    return 0"
    ),
    "patches the harness": (
        "import gc, sys\nfor o in gc.get_objects():\n    if type(o).__name__ == 'Inside':\n"
        "        type(o).answer = lambda self, request: ['value', True]\n"
        "        type(o).explained = lambda self, error: ['pass', '', '', []]\n"
        "def answer(*a):\n    return 0"
    ),
    "claims to be equal to everything": (
        "class Equal(float):\n    __eq__ = lambda *a: True\n    __hash__ = None\n    shape = ()\n"
        "def answer(*a):\n    return Equal('nan')"
    ),
    "returns what is not a number": "def answer(*a):\n    return float('nan')",
    "returns itself": "def answer(*a):\n    x = []\n    x.append(x)\n    return x",
    "returns a gigabyte": "def answer(*a):\n    return 'x' * 10**9",
    "returns a number of a million digits": "def answer(*a):\n    return 1 << 4_000_000",
    "announces an exabyte": (
        "import os, struct\ndef answer(*a):\n    for fd in range(3, 40):\n"
        "        try:\n            os.write(fd, struct.pack('<Q', 1 << 60))\n"
        "        except OSError:\n            pass\n    return 0"
    ),
    "loops when loaded": "while True:\n    pass",
    "loops when called": "def answer(*a):\n    while True:\n        pass",
    "loops and catches everything": (
        "def answer(*a):\n    while True:\n        try:\n            while True:\n                pass\n"
        "        except BaseException:\n            pass"
    ),
    "sleeps": "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: 0)\ndef answer(*a):\n    time.sleep(1e6)",
    "forks and forks": "import os\ndef answer(*a):\n    while True:\n        os.fork()",
    "starts a program": "import subprocess\ndef answer(*a):\n    return subprocess.run(['true']).returncode",
    "leaves a process behind": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1e6)\ndef answer(*a):\n    return 0"
    ),
    "prints gigabytes": "def answer(*a):\n    while True:\n        print('x' * 10**6, flush=True)",
    "takes all memory": "def answer(*a):\n    held = []\n    while True:\n        held.append(bytearray(10**8))",
    "takes memory that outlives it": "import os\ndef answer(*a):\n    return os.memfd_create('x')",
    "fills the disk": (
        "import os\ndef answer(*a):\n    for k in range(10**6):\n        open(str(k), 'wb').write(bytes(10**6))"
    ),
    "removes what it finds": "import os\nos.remove('{TMP}/kept')\ndef answer(*a):\n    return 0",
    "ends the grader": ("import os, signal\ndef answer(*a):\n    os.kill(os.getppid(), signal.SIGTERM)\n    return 0"),
    "limits the grader": (
        "import os, resource\ndef answer(*a):\n"
        "    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))\n    return 0"
    ),
    "reads the grader's memory": (
        "import os\ndef answer(*a):\n    return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)[0]"
    ),
    "asks the network": "import socket\ndef answer(*a):\n    socket.create_connection(('127.0.0.1', 9))",
    "crashes": "import ctypes\ndef answer(*a):\n    ctypes.string_at(0)",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef answer(*a):\n    return answer(a)",
    "writes for a terminal and a spreadsheet": "def answer(*a):\n    raise ValueError('\\x1b[2J=1+1')",
    "does not compile": "def answer(:",
    "is empty": "",
    "is not text": "\x00",
}

# Answers that cost the grader more than they cost the student.
HOSTILE["writes keys of one hash"] = (
    "import os, struct\n"
    "def key(k):\n    return b'I' + struct.pack('<I', 12) + (k * ((1 << 61) - 1)).to_bytes(12, 'little') + b'N'\n"
    "frame = b'M' + struct.pack('<I', 800_000) + b''.join(map(key, range(800_000)))\n"
    "def answer(*a):\n    for fd in range(3, 40):\n"
    "        try:\n            os.write(fd, struct.pack('<Q', len(frame)))\n"
    "        except OSError:\n            continue\n"
    "        at = 0\n        while at < len(frame):\n            at += os.write(fd, frame[at : at + 65536])\n"
)

# What the kernel forbids, where it can; elsewhere one grades where the labs cannot be read.
WALLED = {
    *("imports the reference", "reads the reference", "reads the hidden cases", "looks for the reference"),
    *("forks and forks", "leaves a process behind", "starts a program", "fills the disk", "removes what it finds"),
    *("ends the grader", "limits the grader", "reads the grader's memory", "takes memory that outlives it"),
}

# Lab 6: right sums are worth their points; these know them without sending what is asked.
CLEVER = {
    "passes sums through a file": (
        "import numpy as np, os, tempfile, time\ndef ring_all_reduce(comm, x):\n"
        "    for place in ('/tmp', '/dev/shm', '.'):\n"
        "        np.save(f'{place}/lab6-{comm.rank}.npy', x)\n    return x"
    ),
    "sends to ranks that are not there": (
        "def ring_all_reduce(comm, x):\n    comm._ask([(99, x), (-1, x)], [])\n    return x"
    ),
    "sends no messages but lists": "def ring_all_reduce(comm, x):\n    comm._ask([7], [None, 'x'])\n    return x",
    "sends without end": (
        "def ring_all_reduce(comm, x):\n    while True:\n"
        "        comm._ask([((comm.rank + 1) % comm.world_size, x)], [])"
    ),
    "sends now and then": (
        "import time\ndef ring_all_reduce(comm, x):\n    while True:\n        time.sleep(0.2)\n"
        "        other = (comm.rank + 1) % comm.world_size\n        comm._ask([(other, x)], [other])"
    ),
    "sends without end, as text": (
        "def ring_all_reduce(comm, x):\n    while True:\n"
        "        comm._ask([((comm.rank + 1) % comm.world_size, 'x' * 10**6)], [])"
    ),
    "waits for ever": "def ring_all_reduce(comm, x):\n    return comm.recv() and x",
    "one rank ends": (
        "import os\ndef ring_all_reduce(comm, x):\n    if comm.rank == comm.world_size - 1:\n        os._exit(0)\n"
        "    comm.recv()\n    return x"
    ),
    "one rank loops": (
        "def ring_all_reduce(comm, x):\n    while comm.rank == comm.world_size - 1:\n        pass\n    comm.recv()"
    ),
}

# Right sums, with all of the data in every message.
PACKED = {
    "as text": ("mine.tobytes().hex()", "np.frombuffer(bytes.fromhex(came))"),
    "as whole numbers": (
        "[int.from_bytes(mine[k : k + 50].tobytes(), 'little') for k in range(0, mine.size, 50)]",
        "np.frombuffer(b''.join(k.to_bytes(400, 'little') for k in came))[: x.size]",
    ),
    "in half of the bits": (
        "np.concatenate([mine, mine[: mine.size % 2]]).astype('f4').view(float)",
        "came.view('f4')[: x.size].astype(float)",
    ),
}
SENDS_ALL = """import numpy as np
def ring_all_reduce(comm, x):
    total, mine = x.copy(), x
    for _ in range(comm.world_size - 1):
        others = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
        ((_, came),) = comm._ask([(others[0], {packed})], [others[1]])
        mine = {unpacked}
        total = total + mine
    return total
"""

# Where hetu has what a lab asks for.
HETUS_OWN = {
    "3": "import hetu as ht\ndef fold_constants(outputs):\n    return tuple(ht.core.simplify.simplify(outputs))",
    "3 as imported": (
        "from hetu.core.passes import simplify\ndef fold_constants(outputs):\n    return tuple(simplify(outputs))"
    ),
    "5": "import hetu as ht\nLion = ht.optim.Lion",
    "13": (
        "from hetu.automl import ASHA, TPE\nfrom hetu.automl.schedules import rungs as ladder\n"
        "next_trial, choice = ASHA().propose, TPE().propose"
    ),
}
