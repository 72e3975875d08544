"""Given, not a lab: ranks that send each other arrays. `python transport.py 4 train.py ARGUMENTS` starts four of them.

Each rank is a process. Between any two of them lies a socket, which the parent made before it started them. A message
is its length and its bytes; the receiver says what it expects, so a length that differs is an error on both sides and
never a wrong number. Sends return at once: a thread for each neighbor takes what is still to go. Needs a POSIX system.
"""

import json
import os
import queue
import select
import socket
import subprocess
import sys
import threading

import numpy as np

PATIENCE = 60.0  # seconds, for a rank that waits for a message


class Comm:
    """What a rank knows of the others: `rank` is its number, `world_size` how many there are."""

    def __init__(self, rank, sockets):
        self.rank, self.world_size, self.sockets = rank, len(sockets) + 1, sockets
        self.bytes_sent = self.messages_sent = 0
        self.queues = {to: queue.SimpleQueue() for to in sockets}
        self.threads = [threading.Thread(target=self._sender, args=(to,), daemon=True) for to in sockets]
        for thread in self.threads:
            thread.start()

    def send(self, to, array):
        """Send the numbers of `array`, as they are now, to the rank `to`."""
        data = np.ascontiguousarray(array).tobytes()
        self.bytes_sent += len(data)
        self.messages_sent += 1
        self.queues[to].put(len(data).to_bytes(8, "little") + data)

    def recv(self, source, buffer):
        """Wait for the next message of the rank `source`, and write it into the array `buffer`, which it must fill."""
        if not buffer.flags.c_contiguous:
            raise ValueError("receive into an array whose numbers lie one after the other, then copy")
        nbytes = int.from_bytes(self._read(source, 8), "little")
        if nbytes != buffer.nbytes:
            raise ValueError(f"rank {self.rank} expects {buffer.nbytes} bytes of rank {source}, which sent {nbytes}")
        buffer[...] = np.frombuffer(self._read(source, nbytes), buffer.dtype).reshape(buffer.shape)

    def exchange(self, sends, recvs):
        """Send each (to, array) of `sends` and receive each (source, buffer) of `recvs`."""
        for to, array in sends:
            self.send(to, array)
        for source, buffer in recvs:
            self.recv(source, buffer)

    def any_source(self):
        """Wait until some rank has sent a message, and return its number."""
        ready, _, _ = select.select(list(self.sockets.values()), [], [], PATIENCE)
        if not ready:
            raise TimeoutError(f"rank {self.rank} has waited {PATIENCE:.0f} s for a message of any rank")
        return next(source for source, s in self.sockets.items() if s is ready[0])

    def close(self):
        """Wait until all has been sent."""
        for waiting in self.queues.values():
            waiting.put(None)
        for thread in self.threads:
            thread.join()

    def _sender(self, to):
        while (data := self.queues[to].get()) is not None:
            try:
                self.sockets[to].sendall(data)
            except OSError:
                return  # the other end is gone, and says why itself

    def _read(self, source, nbytes):
        parts = []
        while nbytes:
            try:
                part = self.sockets[source].recv(min(nbytes, 1 << 20))
            except TimeoutError:
                raise TimeoutError(f"rank {self.rank} has waited {PATIENCE:.0f} s for rank {source}") from None
            if not part:
                raise ConnectionError(f"rank {self.rank} waits for rank {source}, which has ended")
            parts.append(part)
            nbytes -= len(part)
        return b"".join(parts)


class Group:
    """Some ranks of `comm` as a communicator of their own, numbered in the order of the list `ranks`."""

    def __init__(self, comm, ranks):
        self.comm, self.ranks = comm, list(ranks)
        self.rank, self.world_size = self.ranks.index(comm.rank), len(self.ranks)

    def send(self, to, array):
        self.comm.send(self.ranks[to], array)

    def recv(self, source, buffer):
        self.comm.recv(self.ranks[source], buffer)

    def exchange(self, sends, recvs):
        others = self.ranks
        self.comm.exchange([(others[to], a) for to, a in sends], [(others[source], b) for source, b in recvs])


def connect():
    """The communicator of this process, which `launch` has started."""
    told = json.loads(os.environ["TRACK_RANK"])
    sockets = {int(other): socket.socket(fileno=number) for other, number in told["sockets"].items()}
    for s in sockets.values():
        s.settimeout(PATIENCE)
    return Comm(told["rank"], sockets)


def launch(world_size, command):
    """Run a Python command (a list: script, arguments) on `world_size` ranks. 0, or the first other exit status."""
    ends = [{} for _ in range(world_size)]
    for a in range(world_size):
        for b in range(a):
            ends[a][b], ends[b][a] = socket.socketpair()
    ranks = []
    for rank, mine in enumerate(ends):
        numbers = {other: s.fileno() for other, s in mine.items()}
        env = os.environ | {"TRACK_RANK": json.dumps({"rank": rank, "sockets": numbers}), "OPENBLAS_NUM_THREADS": "1"}
        ranks.append(subprocess.Popen([sys.executable, *command], env=env, pass_fds=list(numbers.values())))
    for mine in ends:
        for s in mine.values():
            s.close()  # so that a rank that ends is seen by the others
    return next(filter(None, [rank.wait() for rank in ranks]), 0)


if __name__ == "__main__":
    sys.exit(launch(int(sys.argv[1]), sys.argv[2:]))
