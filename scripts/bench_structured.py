#!/usr/bin/env python3
"""Puts one cluster under 16 answers at a time, in turn free and bound to a JSON schema, and prints both's gaps between tokens."""
import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_common import at_least_1, last_line, progress, run_main, stop_all
import bench_serve

# Answers at a time, and tokens of each. A list of so many items is never over before.
ANSWERS, OUTPUT = 16, 160
ITEM = {
    "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8})?$"},
    "kind": {"enum": ["red", "green", "blue", None]},
    "count": {"type": "integer", "minimum": 0, "maximum": 999},
    "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 1, "maxItems": 3},
}
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": ITEM, "required": list(ITEM), "additionalProperties": False},
    "minItems": OUTPUT,
    "$defs": {"tag": {"type": "string", "maxLength": 12}},
}
SIDES = ("free", "schema")
ROWS = {"gap_p50_s": "gap between tokens, p50", "gap_p99_s": "gap between tokens, p99"}


class Baton(bench_serve.Baton):
    """A cluster as `baton up` starts it."""

    def command(self):
        command = [self.args.baton, "up", "--model", self.args.model, "--http", f"127.0.0.1:{self.port}", "--grpc", "127.0.0.1:0"]
        return [*command, "--ready-file", self.work / "ready.json", "--log-dir", self.work / "roles"], None

    def after_start(self):
        roles = json.loads((self.work / "ready.json").read_text())
        self.url = f"grpc://{roles['conductor']['grpc']}"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baton", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    return parser.parse_args()


def measured(args, url, work, side, seed):
    command = [args.baton, "bench", "serve", url, "--rate", 1000, "--requests", ANSWERS, "--max-tokens", OUTPUT, "--prompt-chars", 200]
    command += ["--seed", seed, "--json", *(["--json-schema", work / "schema.json"] if side == "schema" else [])]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench-structured: {side}: {last_line(done.stderr or done.stdout)}")
    report = json.loads(done.stdout.strip().splitlines()[-1])
    if report["short"] or report["ends"]["met"] + report["ends"]["late"] != ANSWERS:
        sys.exit(f"bench-structured: {side}: not {ANSWERS} answers of {OUTPUT} tokens (logs are in {work})")
    return report


def main():
    args = arguments()
    work = Path(tempfile.mkdtemp(prefix="bench-structured-"))
    (work / "schema.json").write_text(json.dumps(SCHEMA))
    found = {side: [] for side in SIDES}
    try:
        with Baton(args, work, "cluster") as server:
            for turn in range(args.rounds + 1):
                # Round 0 warms up.
                for side in SIDES if turn % 2 else reversed(SIDES):
                    progress(f"round {turn} of {args.rounds}: {side}")
                    report = measured(args, server.url, work, side, 2 * turn + SIDES.index(side))
                    if turn:
                        found[side].append(report)
    finally:
        stop_all()
    print(f"{'':<26}" + "".join(f"{side:>12}" for side in SIDES) + f"{'ratio':>8}")
    for key, label in ROWS.items():
        free, schema = ([report[key] for report in found[side]] for side in SIDES)
        # Of each round, whose two runs are neighbours: the machine's speed changes.
        ratio = statistics.median(one / other for one, other in zip(schema, free))
        cells = "".join(f"{statistics.median(side) * 1e3:>9.2f} ms" for side in (free, schema))
        print(f"{label:<26}{cells}{ratio:>8.2f}")
    shutil.rmtree(work)


if __name__ == "__main__":
    run_main(main)
