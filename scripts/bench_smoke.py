#!/usr/bin/env python3
"""A minute of ratios against yardsticks in the tree (make bench-smoke, and CI): has an order of magnitude been lost?

Both sides of a ratio run in turn, ROUNDS times, and the median of the rounds counts: so a slow machine or a noisy
neighbour slows both. A floor is half of the least that two 2-core EPYCs with AVX2 gave on 2026-11-25 (1.23, 1.25,
27.5); it is no goal. The yardsticks are the engine's scalar kernels, a blocking copy loop over one connection, and
memcpy. BATON names another binary.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
BATON = os.environ.get("BATON") or os.path.join(os.environ.get("CARGO_TARGET_DIR") or os.path.join(ROOT, "target"), "debug", "baton")
ROUNDS = 3


def baton(*arguments, **environment):
    # The user's own BATON_ variables decide nothing here.
    env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")} | environment
    done = subprocess.run([BATON, *arguments, "--json"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        sys.exit(f"bench-smoke: baton {' '.join(arguments)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def transfer(*arguments):
    return baton("bench", "transfer", *arguments, "--seconds", "1", "--working-set", "64MiB")["gb_s"]


def score(model, text_bytes, **environment):
    """Tokens per second of a text's prefill."""
    with open(os.path.join(ROOT, "crates/bench/tests/fixtures/alice.txt"), encoding="utf-8") as file:
        text = file.read()[:text_bytes]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="bench-smoke-") as file:
        file.write(text)
        file.flush()
        report = baton("score", "--model", model, "--text", file.name, **environment)
    return report["tokens"] / report["seconds"]


def checks(model):
    """Name, ratio of a round, floor."""
    scalar = lambda: score(model, 400, BATON_ISA="scalar")
    yield "tcp : bare copy loop, GB/s", lambda: transfer("--transport", "tcp") / transfer("--baseline", "copy-loop"), 0.6
    yield "shm : memcpy, GB/s", lambda: transfer("--transport", "shm") / transfer("--baseline", "memcpy"), 0.6
    yield "prefill : scalar kernels, tokens/s", lambda: score(model, 4000) / scalar(), 13.7


def main():
    model = os.environ.get("BATON_MODEL") or subprocess.run(
        [os.path.join(ROOT, "scripts/fetch-model.sh")], check=True, capture_output=True, text=True).stdout.strip()
    failed = []
    for name, ratio, floor in checks(model):
        found = statistics.median(ratio() for _ in range(ROUNDS))
        print(f"bench-smoke: {name:36} {found:8.2f} (floor {floor})", flush=True)
        if found < floor:
            failed.append(name)
    if failed:
        sys.exit(f"bench-smoke: below the floor: {', '.join(failed)}")


main()
