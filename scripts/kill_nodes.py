#!/usr/bin/env python3
"""Kills a node of a cluster that `baton up` runs, drawn from all, again and again (bench-sim-vs-live)."""

import contextlib
import os
import random
import signal
import sys
import time

NODES = {b"baton-prefill", b"baton-decode"}


def nodes(up):
    """The processes of nodes that `up` has started."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                parent = int(stat.read().rsplit(b")", 1)[1].split()[1])
            with open(f"/proc/{entry}/cmdline", "rb") as command:
                name = os.path.basename(command.read().split(b"\0")[0])
        except (FileNotFoundError, ProcessLookupError, IndexError):
            continue
        if parent == up and name in NODES:
            yield int(entry)


def main():
    up, every = int(sys.argv[1]), float(sys.argv[2])
    draw = random.Random(1)
    while True:
        time.sleep(draw.expovariate(1 / every))
        if not os.path.exists(f"/proc/{up}"):
            return
        alive = sorted(nodes(up))
        with contextlib.suppress(IndexError, ProcessLookupError):
            os.kill(draw.choice(alive), signal.SIGKILL)


if __name__ == "__main__":
    main()
