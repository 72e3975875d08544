"""What the process of a student's code may not do: take much memory, start others, read what it was not given.

`resource` limits hold on all but Windows; Landlock (files, network, signals) and seccomp (processes) on Linux, where
neither needs a privilege. `build` says which of them stand, and the grader passes it on. Left out: other kinds of
sandboxes. On macOS and Windows, grade where the labs' folder cannot be read.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence

FILE_BYTES = 32 << 20
OPEN_FILES = 128

# Landlock, from linux/landlock.h: every right over files that a kernel knows is taken, reading is given back.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many rights over files a version knows
READ_FILE, LIST = 1 << 2, 1 << 3
TCP, SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
PATH_BENEATH = 1

# System calls that make processes, end them, look into them or change their limits, then sockets, memory that outlives
# a process, and what kernels were broken through; numbers of asm/unistd.h. Both rows name the same calls.
CALLS = {  # the architecture, clone, clone3, and what is refused
    "x86_64": (0xC000003E, 56, 435, {
        *(57, 58, 59, 322, 62, 200, 234, 424, 109, 112, 101, 310, 311, 434, 438, 302, 272, 308),
        *(41, 29, 64, 68, 240, 319, 425, 321, 298, 323, 250, 141, 142, 144, 203, 251, 314),
    }),
    "aarch64": (0xC00000B7, 220, 435, {
        *(221, 281, 129, 130, 131, 424, 154, 157, 117, 270, 271, 434, 438, 261, 97, 268),
        *(198, 194, 190, 186, 180, 279, 425, 280, 241, 282, 219, 140, 118, 119, 122, 30, 274),
    }),
}  # fmt: skip
NEW_THREAD = 0x00010000
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NOT_PERMITTED, NO_SUCH_CALL = 1, 38


def build(readable: Sequence[str], listed: Sequence[str], memory: int, processor_seconds: int) -> list[str]:
    """Put up what this system has, for this process and all that it could start; the names of what stands."""
    stands = []
    if _limits(memory, processor_seconds):
        stands.append("limits")
    if sys.platform == "linux":
        library = ctypes.CDLL(None, use_errno=True)
        library.prctl(38, 1, 0, 0, 0)  # no new privileges, which both ask for
        if _files(library, readable, listed):
            stands.append("files")
        if _calls(library):
            stands.append("processes")
    return stands


def _limits(memory: int, processor_seconds: int) -> bool:
    try:
        import resource
    except ImportError:
        return False
    wanted = {
        "RLIMIT_AS": memory,
        "RLIMIT_CPU": processor_seconds,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": OPEN_FILES,
    }
    if sys.platform != "linux":
        wanted["RLIMIT_NPROC"] = 0  # on Linux it would forbid threads, and says nothing to root: seccomp is for that
    for name, most in wanted.items():
        if hasattr(resource, name):
            kind = getattr(resource, name)
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            soft = max(most - 1, 1) if name == "RLIMIT_CPU" else most  # the signal that tells, a second before the end
            try:
                resource.setrlimit(kind, (soft, most))
            except (ValueError, OSError):  # macOS knows RLIMIT_AS and refuses it
                continue
    return True


def _files(library: ctypes.CDLL, readable: Sequence[str], listed: Sequence[str]) -> bool:
    """Landlock: read below `readable` alone, list `listed` folders; nothing is written, connected to or signaled."""
    version = library.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (1 << RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("<QQQ", rights, TCP, SCOPES)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = library.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for path, given in [*((p, READ_FILE | LIST) for p in readable), *((p, LIST) for p in listed)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        given = given if os.path.isdir(path) else READ_FILE
        library.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("<Qi", given, place), 0)
        os.close(place)
    done = library.syscall(RESTRICT_SELF, rules, 0)
    os.close(rules)
    return bool(done == 0)


def _calls(library: ctypes.CDLL) -> bool:
    """Seccomp: no new process (threads are all right), no other program, no signal to others, no look into others."""
    if platform.machine() not in CALLS or sys.maxsize < 1 << 32:
        return False
    arch, clone, clone3, refused = CALLS[platform.machine()]

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    load, equal, any_bit, give = 0x20, 0x15, 0x45, 0x06
    numbers = sorted(refused)
    # What a system call of the wrong architecture, or of x32, could do is refused as well.
    rows = [step(load, 4), step(equal, arch, 1, 0), step(give, REFUSE | NOT_PERMITTED), step(load, 0)]
    rows += [step(0x35, 0x40000000, 0, 1), step(give, REFUSE | NOT_PERMITTED)]
    rows += [step(equal, clone3, 0, 1), step(give, REFUSE | NO_SUCH_CALL)]  # libraries then try clone, which tells
    rows += [row for n in numbers for row in (step(equal, n, 0, 1), step(give, REFUSE | NOT_PERMITTED))]
    rows += [step(equal, clone, 0, 3), step(load, 16), step(any_bit, NEW_THREAD, 1, 0)]
    rows += [step(give, REFUSE | NOT_PERMITTED), step(give, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(rows))
    filter_ = struct.pack("@HP", len(rows), ctypes.addressof(program))
    return bool(library.prctl(22, 2, filter_, 0, 0) == 0)
