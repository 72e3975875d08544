"""What carries the server's messages: ZeroMQ, processes, shared memory, snapshots, and the worker's end."""
