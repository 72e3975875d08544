"""Given, not a lab: ranks that send each other arrays. `python transport.py 4 train.py ...` starts four of them.

Each rank is a process. Between any two of them lies a socket, which the parent made before it started them. A message
is an array with its dtype and shape. Sends return at once: a thread for each neighbor takes what is still to go. A rank
that has ended, or is waited for too long, is an error of those that wait. Needs a POSIX system.
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
        self.open = list(sockets)  # those that have not ended
        self.bytes_sent = self.messages_sent = 0
        self.queues = {to: queue.SimpleQueue() for to in sockets}
        self.threads = [threading.Thread(target=self._sender, args=(to,), daemon=True) for to in sockets]
        for thread in self.threads:
            thread.start()

    def exchange(self, sends, recvs):
        """Send each (to, array) of `sends`, and fill the buffer of each (source, buffer) of `recvs`."""
        for to, array in sends:
            self.send(to, array)
        for source, buffer in recvs:
            array = self.recv(source)
            if (array.dtype, array.shape) != (buffer.dtype, buffer.shape):
                raise ValueError(
                    f"rank {self.rank} receives {array.dtype}{list(array.shape)} from rank {source}, "
                    f"into a buffer of {buffer.dtype}{list(buffer.shape)}"
                )
            buffer[...] = array

    def send(self, to, array):
        """Send the numbers of `array` to the rank `to`, as they are now."""
        array = np.asarray(array)
        self.bytes_sent += array.nbytes
        self.messages_sent += 1
        head = json.dumps([array.dtype.str, array.shape]).encode()
        self.queues[to].put(len(head).to_bytes(4, "little") + head + array.tobytes())

    def recv(self, source=None):
        """Wait for the next array that the rank `source` sent; without a source for that of any rank: (rank, array)."""
        if source is None:
            source = self._ready()
            return source, self.recv(source)
        dtype, shape = json.loads(self._read(source, int.from_bytes(self._read(source, 4), "little")))
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(self._read(source, nbytes), dtype).reshape(shape)

    def _ready(self):
        while self.open:
            ready, _, _ = select.select([self.sockets[source] for source in self.open], [], [], PATIENCE)
            if not ready:
                raise TimeoutError(f"rank {self.rank} has waited {PATIENCE:.0f} s for a message of any rank")
            source = next(source for source in self.open if self.sockets[source] is ready[0])
            if ready[0].recv(1, socket.MSG_PEEK):
                return source
            self.open.remove(source)  # it has ended
        raise ConnectionError(f"rank {self.rank} waits for a message of any rank, and all others have ended")

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
        data = bytearray(nbytes)  # so that the array made of it can be written
        view = memoryview(data)
        while view:
            try:
                got = self.sockets[source].recv_into(view)
            except TimeoutError:
                raise TimeoutError(f"rank {self.rank} has waited {PATIENCE:.0f} s for rank {source}") from None
            if not got:
                raise ConnectionError(f"rank {self.rank} waits for rank {source}, which has ended")
            view = view[got:]
        return data


class Group:
    """Some ranks of `comm` as a communicator of their own, numbered in the order of the list `ranks`."""

    def __init__(self, comm, ranks):
        self.comm, self.ranks = comm, list(ranks)
        self.rank, self.world_size = self.ranks.index(comm.rank), len(self.ranks)

    def send(self, to, array):
        self.comm.send(self.ranks[to], array)

    def recv(self, source):
        return self.comm.recv(self.ranks[source])

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
    if os.name != "posix":
        raise SystemExit("ranks inherit sockets, which needs a POSIX system: Linux, macOS, or Windows' WSL")
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
