"""The process of a peer: `python -m bench.peers.worker FD MODULE.CLASS` obeys what comes through a connection.

The class has `prepare(ops, ids, hidden, num_experts, careful) -> note`, where `careful` asks for no option that may
hang, and `times_us(op, num)`. A PeerError is an answer; any other exception ends the process, as a CUDA error must.
"""

from __future__ import annotations

import importlib
import sys
from multiprocessing.connection import Connection

from bench.peers import PeerError


def main() -> None:
    link = Connection(int(sys.argv[1]))
    module, _, name = sys.argv[2].rpartition(".")
    peer = getattr(importlib.import_module(module), name)()
    link.send(("done", None))
    while True:
        try:
            command, args = link.recv()
        except EOFError:  # the bench has closed its end, or has died
            return
        try:
            link.send(("done", getattr(peer, command)(*args)))
        except PeerError as error:
            link.send(("refused", str(error)))


if __name__ == "__main__":
    main()
