"""What the scripts that measure beside others share: processes that end with them, sides that are not there, and where the engines are."""
import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

# Processes that were started and have not been stopped.
CHILDREN = []


class Unavailable(Exception):
    """A side that is not here, or does not work here: a line of the table. `output` is what it said."""

    def __init__(self, problem, output=""):
        super().__init__(problem)
        self.output = output


def start(command, missing="does not exist", **options):
    """A process in a group of its own, so that what it starts can be ended with it."""
    try:
        child = subprocess.Popen([str(part) for part in command], text=True, start_new_session=True, **options)
    except FileNotFoundError as error:
        raise Unavailable(f"{error.filename} {missing}") from error
    CHILDREN.append(child)
    return child


def stop(child):
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()
    if child.stdout:
        child.stdout.close()
    CHILDREN.remove(child)


def stop_all():
    for child in list(CHILDREN):
        stop(child)


def run_main(main):
    """Runs a script's main, which stops what it started; a signal to end lets it do so."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)


def last_line(text):
    """What a process said last, shortened; nothing if it said nothing."""
    return (text.strip().splitlines() or [""])[-1][-160:]


def progress(text):
    """What is measured now: on a terminal in one line that is overwritten, else a line each, so that a log shows progress."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def at_least_1(text):
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}': expected an integer of at least 1")
    return int(text)


def add_engines(parser, baton_required=False):
    """Options that say where the engines and their models are."""
    parser.add_argument("--baton", type=Path, required=baton_required, help="the binary")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's binaries")
    parser.add_argument("--vllm", type=Path, help="Python environment of vLLM")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH", help="of a model")


def files(args):
    """Paths of models, by name."""
    return dict(file.split("=", 1) for file in args.file)


def vllm_environment(venv, cores, threads):
    """vLLM as its guide for CPUs recommends: Intel's OpenMP and tcmalloc before all else, a thread bound to each core."""
    preloads = [*venv.glob("lib/libiomp5.so"), *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    return {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "LD_PRELOAD": ":".join(map(str, preloads)),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(venv / "compiled"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
