#!/usr/bin/env python3
"""NIXL's UCX backend between two processes: scattered blocks, several batches under way, as `baton bench transfer` does it. Prints JSON.

Everything that can be done once is done once: descriptor lists are prepared for all blocks, and the transfers of a whole round over the working set
are made before the clock starts and posted again and again. UCX_TLS in the environment chooses UCX' transports.
"""
import argparse
import base64
import json
import mmap
import os
import random
import resource
import subprocess
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--spans", type=int, default=16)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warm-up", type=float, default=0.5)
    parser.add_argument("--working-set", type=int, default=256 << 20)
    parser.add_argument("--progress-thread", choices=["both", "target"], default="both", help="both is NIXL's default")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def memory(length, fill):
    """Pages of the system's usual size, as those of the others here; numpy would ask for huge ones."""
    region = np.frombuffer(mmap.mmap(-1, length), dtype=np.uint8)
    if fill:
        words = np.arange(length // 8, dtype=np.uint64) + np.uint64(1)
        region[: length // 8 * 8].view(np.uint64)[:] = words * np.uint64(0x9E3779B97F4A7C15)
    else:
        region[:] = 0
    return region


def agent(name, progress_thread):
    return nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"]))


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def orders(args):
    blocks = args.working_set // args.block_bytes
    source, target = list(range(blocks)), list(range(blocks))
    random.Random(1).shuffle(source)
    random.Random(2).shuffle(target)
    return source, target


def serve(args):
    """The end that owns the memory: its progress thread does the work."""
    region = memory(args.working_set, fill=False)
    own = agent("target", True)
    own.register_memory([(region.ctypes.data, len(region), 0, "")], "DRAM")
    ready = {"metadata": base64.b64encode(own.get_agent_metadata()).decode(), "address": region.ctypes.data}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        if line.startswith("cpu"):
            print(json.dumps(cpu_seconds()), flush=True)
        else:  # compare that many blocks
            expected = memory(args.working_set, fill=True)
            source, target = orders(args)
            size = args.block_bytes
            for s, t in list(zip(source, target))[: int(line)]:
                if not np.array_equal(region[t * size : (t + 1) * size], expected[s * size : (s + 1) * size]):
                    sys.exit(f"block {t} is wrong")
            print("true", flush=True)
    # Taking an agent apart can hang while its peer lives; nothing is left to do.
    os._exit(0)


def start_target():
    command = [sys.executable, __file__, *sys.argv[1:], "--target"]
    target = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(line):
        if line:
            target.stdin.write(line + "\n")
            target.stdin.flush()
        while True:
            answer = target.stdout.readline()
            if not answer:
                sys.exit("the target has ended")
            if answer[0] in "{tf0123456789":  # anything else is a log line
                return json.loads(answer)

    return target, ask


def transfers(args, own, remote, base, remote_base):
    """The transfers of one round over the working set."""
    blocks, size = args.working_set // args.block_bytes, args.block_bytes
    addresses = np.arange(blocks, dtype=np.uint64) * np.uint64(size)

    def prepared(name, start):
        rows = np.stack([addresses + np.uint64(start), np.full(blocks, size, np.uint64), np.zeros(blocks, np.uint64)], axis=1)
        return own.prep_xfer_dlist(name, rows, "DRAM")

    local, far = prepared("NIXL_INIT_AGENT", base), prepared(remote, remote_base)
    source, target = (np.array(order, dtype=np.int32) for order in orders(args))
    made = []
    for first in range(0, blocks - args.spans + 1, args.spans):
        part = slice(first, first + args.spans)
        made.append(own.make_prepped_xfer("WRITE", local, source[part], far, target[part]))
    return made


def run(args, own, made, seconds):
    """Keeps `depth` transfers under way. Returns batches, seconds and latencies."""
    under_way, latencies, following, began = [], [], 0, time.perf_counter()
    transfer, state, now = own.transfer, own.check_xfer_state, time.perf_counter
    while True:
        while len(under_way) < min(args.depth, len(made)) and now() - began < seconds:
            handle = made[following % len(made)]
            following += 1
            under_way.append((handle, now()))
            if transfer(handle) == "ERR":
                sys.exit("a transfer was refused")
        if not under_way:
            return len(latencies), now() - began, latencies
        pending = []
        for handle, posted in under_way:
            answer = state(handle)
            if answer == "DONE":
                latencies.append(now() - posted)
            elif answer == "ERR":
                sys.exit("a transfer failed")
            else:
                pending.append((handle, posted))
        under_way = pending


def initiate(args):
    target, ask = start_target()
    ready = ask(None)
    region = memory(args.working_set, fill=True)
    own = agent("initiator", args.progress_thread == "both")
    own.register_memory([(region.ctypes.data, len(region), 0, "")], "DRAM")
    remote = own.add_remote_agent(base64.b64decode(ready["metadata"]))
    remote = remote.decode() if isinstance(remote, bytes) else remote
    made = transfers(args, own, remote, region.ctypes.data, ready["address"])
    run(args, own, made, args.warm_up)
    target_cpu, cpu = ask("cpu"), cpu_seconds()
    batches, seconds, latencies = run(args, own, made, args.seconds)
    cpu, target_cpu = cpu_seconds() - cpu, ask("cpu") - target_cpu
    size = batches * args.spans * args.block_bytes
    if args.verify:
        ask(str(min(batches, len(made)) * args.spans))
    latencies.sort()
    print(json.dumps({
        "transport": "nixl-ucx", "op": "write", "block_bytes": args.block_bytes, "spans": args.spans, "depth": args.depth,
        "working_set": args.working_set, "seconds": seconds, "batches": batches, "bytes": size, "gb_s": size / seconds / 1e9,
        "p50_us": latencies[len(latencies) // 2] * 1e6, "p99_us": latencies[len(latencies) * 99 // 100] * 1e6,
        "cpu_seconds_per_gb": (cpu + target_cpu) / (size / 1e9), "verified": args.verify,
    }), flush=True)
    target.kill()
    target.wait()
    os._exit(0)


if __name__ == "__main__":
    parsed = arguments()
    serve(parsed) if parsed.target else initiate(parsed)
