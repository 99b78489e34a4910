#!/usr/bin/env python3
"""Runs all sides in turn, round after round, and prints one table: medians of GB/s, and ratios to the bare loop and to memcpy."""
import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench_common import Unavailable, free_port, progress, run_main, start, stop, stop_all

MIB = 1 << 20
SIZES = [(MIB, 16), (64 << 10, 100), (12 << 10, 1000)]
HERE = Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baton", required=True)
    parser.add_argument("--python", required=True, help="of the environment with the others' packages")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--working-set", type=size, default=256 * MIB)
    parser.add_argument("--only", type=re.compile, default=re.compile("."), help="a regular expression of rows")
    parser.add_argument("--json", type=Path, help="write every figure there")
    return parser.parse_args()


def size(text):
    match = re.fullmatch(r"(\d+)(KiB|MiB|GiB|)", text)
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}': expected bytes, or a number with KiB, MiB or GiB")
    return int(match[1]) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[match[2]]


def name(block, spans):
    return f"{block // MIB} MiB x {spans}" if block >= MIB else f"{block >> 10} KiB x {spans}"


def run(command, limit, environment=None):
    """The output of a command, stderr too, or why there is none."""
    # BENCH_PREFIX, such as "taskset -c 0,1", stands before every command that measures.
    command = shlex.split(os.environ.get("BENCH_PREFIX", "")) + [str(part) for part in command]
    child = start_tool(command, {**os.environ, **(environment or {})})
    try:
        text, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"not done within {limit:.0f} s") from error
    finally:
        stop(child)
    if child.returncode != 0:
        raise Unavailable(reason(text) or f"ended with {child.returncode}", text)
    return text


def reason(text):
    """The last line, or what is in it if it is Baton's error in JSON."""
    last = (text.strip().splitlines() or [""])[-1]
    try:
        return json.loads(last)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return last[-160:]


def start_tool(command, environment=None):
    """Its errors are among its output."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return start(command, missing="is not installed", env=environment, **pipes)


def report(text):
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise Unavailable("no report")
    return json.loads(lines[-1])["gb_s"]


def limit(args):
    return args.seconds + 25


def baton(*flags):
    def measure(args):
        command = [args.baton, "bench", "transfer", *flags, "--seconds", args.seconds, "--working-set", args.working_set, "--json"]
        return report(run(command, limit(args)))

    return measure


def iperf3(args):
    if not shutil.which("iperf3"):
        raise Unavailable("iperf3 is not installed")
    port = free_port()
    server = start_tool(["iperf3", "--server", "--one-off", "--port", port, "--bind", "127.0.0.1", "--forceflush"])
    try:
        time.sleep(0.3)
        text = run(["iperf3", "--client", "127.0.0.1", "--port", port, "--length", "1M", "--time", max(1, round(args.seconds)), "--json"], limit(args))
        return json.loads(text[text.index("{") :])["end"]["sum_received"]["bits_per_second"] / 8e9
    finally:
        stop(server)


def mooncake(block, spans, threads):
    def measure(args):
        bench = Path(args.python).parent / "transfer_engine_bench"
        common = ["-metadata_server", "P2PHANDSHAKE", "-protocol", "tcp", f"-buffer_size={args.working_set}", f"-block_size={block}"]
        common += [f"-batch_size={spans}", "-report_precision=3"]
        target = start_tool([bench, "-mode=target", f"-local_server_name=127.0.0.1:{free_port()}", *common])
        try:
            peer = listening(target)
            command = [bench, "-mode=initiator", f"-segment_id={peer}", f"-local_server_name=127.0.0.1:{free_port()}", "-operation=write"]
            command += [*common, f"-duration={max(1, round(args.seconds))}"]
            if threads:
                command.append(f"-threads={threads}")
            text = run(command, limit(args))
        except Unavailable as problem:
            # Every thread's whole batch waits in one queue, which has a bound.
            raise Unavailable(f"{problem} (its queue was full)" if "queue-full" in problem.output else str(problem)) from problem
        finally:
            stop(target)
        found = re.search(r"throughput ([\d.]+) GB/s", text)
        if not found:
            raise Unavailable("no throughput in its output")
        return float(found[1])

    return measure


def listening(target):
    """Where a Mooncake target's handshake port is: it takes one of its own choice, and says so on a line among others."""
    for line in target.stdout:
        found = re.search(r"listening on ([\d.]+:\d+)", line)
        if found:
            # Its data port opens right after this line.
            time.sleep(0.5)
            return found[1]
    raise Unavailable("its target has ended")


def nixl(block, spans, transports, progress):
    def measure(args):
        command = [args.python, HERE / "bench_nixl.py", "--block-bytes", block, "--spans", spans, "--seconds", args.seconds]
        command += ["--working-set", args.working_set, "--progress-thread", progress]
        environment = {"UCX_TLS": transports} if transports else {"UCX_TLS": "all"}
        return report(run(command, limit(args), {**environment, "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}))

    return measure


def rows():
    """(name, what measures it). If there are several ways to run a tool, the best counts."""
    for block, label in [(MIB, "1 MiB"), (64 << 10, "64 KiB")]:
        yield f"bare loop, {label}", {"": baton("--baseline", "copy-loop", "--block-bytes", str(block))}
    yield "memcpy, 1 MiB", {"": baton("--baseline", "memcpy")}
    yield "iperf3, 1 MiB", {"": iperf3}
    for block, spans in SIZES:
        yield f"Baton tcp, {name(block, spans)}", {"": baton("--transport", "tcp", "--block-bytes", str(block), "--spans", str(spans))}
    for block, spans in SIZES:
        yield f"Baton shm, {name(block, spans)}", {"": baton("--transport", "shm", "--block-bytes", str(block), "--spans", str(spans))}
    for block, spans in SIZES:
        yield f"Mooncake tcp, {name(block, spans)}, 1 thread", {"": mooncake(block, spans, 1)}
    for block, spans in SIZES:
        yield f"Mooncake tcp, {name(block, spans)}, default threads", {"": mooncake(block, spans, None)}
    for transports, label in [("tcp", "UCX tcp"), (None, "UCX default")]:
        for block, spans in SIZES:
            ways = {"": "both", "progress thread at the target only": "target"}
            yield f"NIXL {label}, {name(block, spans)}", {way: nixl(block, spans, transports, flag) for way, flag in ways.items()}


NOTES = """GB are 1e9 bytes. Ratios are of medians. Working set: {working_set} MiB on each side, scattered blocks (bare loop and memcpy: in order).
iperf3 sends one buffer of 1 MiB again and again. Mooncake's bench sends the same blocks again and again: threads x batch, not the whole
working set. NIXL ran with its default settings and with its progress thread at the target only; the better one is shown."""


def measure_all(args, chosen):
    figures = {}
    for turn in range(args.rounds):
        for label, ways in chosen:
            for way, measure in ways.items():
                cell = figures.setdefault(label, {}).setdefault(way, {"gb_s": [], "failed": 0, "problem": None})
                if cell["problem"] and not cell["gb_s"]:
                    continue  # it will not work in this round either
                progress(f"round {turn + 1} of {args.rounds}: {label} {way}")
                try:
                    cell["gb_s"].append(measure(args))
                except Unavailable as problem:
                    cell["problem"] = str(problem)
                    cell["failed"] += 1
    progress("")
    return figures


def best(ways):
    done = [(statistics.median(cell["gb_s"]), way) for way, cell in ways.items() if cell["gb_s"]]
    return max(done)[1] if done else next(iter(ways))


def table(figures):
    medians = {}
    for label, ways in figures.items():
        cell = ways[best(ways)]
        if cell["gb_s"]:
            medians[label] = statistics.median(cell["gb_s"])
    lines = [f"{'':<46}{'GB/s':>8}{'min':>8}{'max':>8}{'x loop':>8}{'x memcpy':>10}"]
    for label, ways in figures.items():
        way = best(ways)
        cell = ways[way]
        if not cell["gb_s"]:
            lines.append(f"{label:<46}  not measured: {cell['problem']}")
            continue
        row = f"{label:<46}{medians[label]:>8.2f}{min(cell['gb_s']):>8.2f}{max(cell['gb_s']):>8.2f}"
        for baseline, width in [("bare loop, 1 MiB", 8), ("memcpy, 1 MiB", 10)]:
            row += f"{medians[label] / medians[baseline]:>{width}.2f}" if baseline in medians else f"{'-':>{width}}"
        remarks = [way] if way else []
        if cell["failed"]:
            remarks.append(f"failed {cell['failed']} times: {cell['problem']}")
        lines.append(row + (f"  ({'; '.join(remarks)})" if remarks else ""))
    return "\n".join(lines)


def main():
    args = arguments()
    chosen = [(label, ways) for label, ways in rows() if args.only.search(label)]
    if not chosen:
        sys.exit(f"bench-transfer: no row matches '{args.only.pattern}'")
    try:
        figures = measure_all(args, chosen)
    finally:
        stop_all()
    print(table(figures))
    print(f"\n{args.rounds} rounds of {args.seconds:g} s, all in turn. " + NOTES.format(working_set=args.working_set // MIB))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
