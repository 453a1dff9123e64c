"""A peer for test_peers.py: the case's hidden size says what goes wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.peers import PeerError

FINE, REFUSES, CRASHES, CRASHES_UNLESS_CAREFUL, HANGS, RAISES = range(6)


class Fake:
    """Counts the cases it was given."""

    num_prepared = 0

    def prepare(self, ops: Sequence[str], ids: Any, hidden: int, num_experts: int, careful: bool) -> str:
        self.num_prepared += 1
        if hidden == REFUSES:
            raise PeerError("not for us")
        if hidden == CRASHES or (hidden == CRASHES_UNLESS_CAREFUL and not careful):
            print("last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if hidden == HANGS:
            time.sleep(60)
        if hidden == RAISES:
            raise RuntimeError("an illegal memory access")
        return f"{'+'.join(ops)} of {int(ids.sum())}, {self.num_prepared}"

    def times_us(self, op: str, num: int) -> list[float]:
        if op == "exit":
            sys.exit(3)
        return [float(os.getpid())] * num
