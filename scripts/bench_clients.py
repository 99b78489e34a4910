#!/usr/bin/env python3
"""Puts one cluster under the load of `baton bench serve` and of AIPerf, in turn, and prints what each measured."""
import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from bench_common import at_least_1, last_line, progress, run_main, stop_all
from bench_serve import Baton, above_0

# Tokens of each prompt and each answer.
INPUT, OUTPUT = 256, 64
# Ordinary tokens of the model.
TOKEN_IDS = (1000, 49000)
ROWS = {
    "ttft_mean": "TTFT, mean",
    "ttft_p50": "TTFT, p50",
    "ttft_p90": "TTFT, p90",
    "ttft_p99": "TTFT, p99",
    "tbt_p50": "TPOT of a request, p50",
    "tbt_p90": "TPOT of a request, p90",
    "tokens": "output tokens/s",
    "cpu": "CPU of the client",
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--baton", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rate", type=above_0, default=2.0)
    parser.add_argument("--duration", type=above_0, default=30.0)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    args.files, args.up, args.baton_api = {"q4_1": args.model}, [], "http"
    return args


def write_load(work, args, seed):
    """The same load for both: requests at random times. No two prompts have a block in common, nor the two clients': nothing is cached."""
    draw, at, trace, turns = random.Random(seed), 0.0, [], []
    while (at := at + draw.expovariate(args.rate)) < args.duration:
        due = int(at * 1e3) + 1
        trace.append({"timestamp": due, "input_length": INPUT, "output_length": OUTPUT, "hash_ids": [seed * 100_000 + len(trace)]})
        # The prompt goes before the text, which AIPerf insists on.
        prompt = draw.choices(range(*TOKEN_IDS), k=INPUT)
        turns.append({"timestamp": due, "text": "x", "output_length": OUTPUT, "extra": {"prompt": prompt}})
    for name, lines in {"trace": trace, "turns": turns}.items():
        (work / name).with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return len(trace)


def write_tokenizer(folder):
    """AIPerf wants a tokenizer, though the prompts are tokens and the server counts those of the answers."""
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))).save_pretrained(folder)


def run(command, log):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"bench-clients: {Path(command[0]).name}: {last_line(done.stderr or done.stdout)} (all of it is in {log})")
    return done.stdout


def baton(args, url, work, seed):
    said = run([args.baton, "bench", "serve", url, "--trace", work / "trace.jsonl", "--seed", seed, "--json"], work / "baton.log")
    report = json.loads(said.strip().splitlines()[-1])
    figures = {key: report.get(f"{key}_s") for key in ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99")}
    figures |= {"tbt_p50": report["tbt_mean_p50_s"], "tbt_p90": report["tbt_mean_p90_s"], "tokens": report["output_tokens_per_s"]}
    return figures | {"requests": report["ends"]["met"] + report["ends"]["late"], "cached": report["cached_tokens"]}


def aiperf(args, url, work, seed):
    folder = work / "aiperf"
    shutil.rmtree(folder, ignore_errors=True)
    command = [Path(sys.executable).parent / "aiperf", "profile", "--url", url, "--model", args.model.stem, "--tokenizer", work / "tokenizer"]
    command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count", "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"]
    command += ["--input-file", work / "turns.jsonl", "--custom-dataset-type", "single_turn", "--fixed-schedule", "--random-seed", seed]
    run([*command, "--output-artifact-dir", folder, "--ui", "none"], work / "aiperf.log")
    report = json.loads((folder / "profile_export_aiperf.json").read_text())
    ttft, tbt = report["time_to_first_token"], report["inter_token_latency"]
    figures = {f"ttft_{key}": ttft["avg" if key == "mean" else key] / 1e3 for key in ("mean", "p50", "p90", "p99")}
    figures |= {"tbt_p50": tbt["p50"] / 1e3, "tbt_p90": tbt["p90"] / 1e3, "tokens": report["output_token_throughput"]["avg"]}
    return figures | {"requests": int(report["request_count"]["avg"]), "cached": report["total_usage_prompt_cache_read_tokens"]["avg"]}


CLIENTS = {"baton bench serve": baton, "AIPerf": aiperf}


def shown(key, value):
    units = {"tokens": f"{value:.1f}", "cpu": f"{value:.2f} s"}
    return units.get(key, f"{value * 1e3:.2f} ms")


def table(found):
    yield f"{'':<24}" + "".join(f"{name:>20}" for name in found) + f"{'ratio':>10}"
    for key, label in ROWS.items():
        rounds = [[figures[key] for figures in side] for side in found.values()]
        if None in rounds[0]:
            continue
        # Of each round, whose two runs are neighbours: the machine's speed changes.
        ratio = statistics.median(ours / theirs for ours, theirs in zip(*rounds))
        yield f"{label:<24}" + "".join(f"{shown(key, statistics.median(side)):>20}" for side in rounds) + f"{ratio:>10.2f}"


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main():
    args = arguments()
    work = Path(tempfile.mkdtemp(prefix="bench-clients-"))
    write_tokenizer(work / "tokenizer")
    found = {name: [] for name in CLIENTS}
    try:
        with Baton(args, work, "cluster") as server:
            for turn in range(args.rounds + 1):
                # Round 0 warms up.
                sent = write_load(work, args, turn)
                order = list(CLIENTS) if turn % 2 else list(reversed(CLIENTS))
                for name in order:
                    progress(f"round {turn} of {args.rounds}: {name}")
                    before = cpu_seconds()
                    figures = CLIENTS[name](args, server.url, work, turn)
                    if figures["requests"] != sent or figures["cached"]:
                        sys.exit(f"bench-clients: {name}: {figures['requests']} of {sent} answers, {figures['cached']} cached tokens (logs are in {work})")
                    figures["cpu"] = cpu_seconds() - before
                    if turn:
                        found[name].append(figures)
        progress("")
    finally:
        stop_all()
    print("\n".join(table(found)))
    print(f"\n{args.rounds} rounds of {args.duration:g} s at {args.rate:g} requests/s, medians; {INPUT} tokens of prompt and {OUTPUT} of answer.")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    shutil.rmtree(work)


if __name__ == "__main__":
    run_main(main)
