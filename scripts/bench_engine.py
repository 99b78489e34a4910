#!/usr/bin/env python3
"""Runs Baton's engine, llama.cpp and vLLM in turn, in rounds, and prints a table: medians of tokens/s, and the ratios that Baton is to reach."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_common import Unavailable, add_engines, at_least_1, files, last_line, progress, run_main, start, stop, stop_all, vllm_environment

HERE = Path(__file__).resolve().parent
# Of crates/bench/src/inference/measure.rs: sequences have 64 tokens before the first of 16 steps that count.
CONTEXT, STEPS = 64, 16
PROMPTS, BATCHES = (512, 2048), (1, 8, 32)
FIGURES = [f"prefill_{tokens}_tok_s" for tokens in PROMPTS] + [f"decode_{sequences}_tok_s" for sequences in BATCHES]
NAMES = {"q4_1": "Q4_1", "q4_0": "Q4_0", "q8_0": "Q8_0", "bf16": "BF16"}
# What Baton is to reach: against whom, and how many times as fast, in the order of FIGURES.
GOALS = {
    "q4_1": (("llama", "vllm"), (1.3, 1.3, 1.4, 1.4, 1.4)),
    "bf16": (("vllm",), (1.0, 1.0, 1.5, None, 1.2)),
    "q4_0": (("llama",), (3.0, 3.0, 1.2, None, 3.0)),
    "q8_0": (("llama",), (3.0, 3.0, 1.2, None, 3.0)),
}
THREADS_GOAL = 1.8
# llama.cpp's ways that are tried before the rounds; the best one for each figure is measured. A micro-batch is how many tokens it computes at once; none
# that is longer than a prompt differs from one as long.
MICRO_BATCHES = {512: (128, 512), 2048: (512, 2048)}
FLASH_ATTENTION = ("off", "on")
LLAMA_FLAGS = {"ubatch": "--ubatch-size", "attention": "--flash-attn"}
# More CPU than this between its turns, and a side is in the way of the others.
MOST_IDLE_CPU = 0.02


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    add_engines(parser)
    parser.add_argument("--models", type=str.split, default=list(NAMES))
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--repeats", type=at_least_1, default=3)
    parser.add_argument("--threads", type=at_least_1, default=2)
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    args.files = files(args)
    if args.threads > os.cpu_count():
        parser.error(f"--threads is {args.threads}, but this machine has {os.cpu_count()} cores")
    for model in args.models:
        if model not in GOALS or model not in args.files:
            parser.error(f"--models: '{model}': expected {', '.join(GOALS)}, each with its --file")
    return args


def cores(args):
    return f"0-{args.threads - 1}"


def output(args, command, limit=900):
    """What a command prints, or why there is none. All sides run on the same cores."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    child = start(["taskset", "--cpu-list", cores(args), *command], **pipes)
    try:
        text, errors = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{Path(command[0]).name} was not done within {limit} s") from error
    finally:
        stop(child)
    if child.returncode != 0:
        raise Unavailable(last_line(errors) or f"{Path(command[0]).name} ended with {child.returncode}")
    return text


class Baton:
    def __init__(self, args):
        self.args = args

    def measure(self, model, threads):
        command = [self.args.baton, "bench", "engine", "--model", self.args.files[model], "--threads", threads, "--rounds", self.args.repeats]
        report = json.loads(output(self.args, [*command, "--json"]))
        return {figure: report[figure] for figure in FIGURES}


class Llama:
    """llama-bench for one sequence, llama-batched-bench for several."""

    def __init__(self, args):
        self.args = args
        self.best = {}

    def bench(self, model, *flags):
        """Rows of llama-bench."""
        command = [self.args.llama / "llama-bench", "--model", self.args.files[model], "--threads", self.args.threads, "--output", "json", *flags]
        return json.loads(output(self.args, command))

    def batched(self, model, batches, attention, repeats):
        """tokens/s by the number of sequences. The first run of each warms up."""
        command = [self.args.llama / "llama-batched-bench", "--model", self.args.files[model], "--threads", self.args.threads]
        command += ["--ctx-size", max(batches) * (CONTEXT + STEPS), "-b", 2048, "-ub", 512, "--flash-attn", attention, "--output-format", "jsonl"]
        command += ["-npp", CONTEXT, "-ntg", STEPS, "-npl", ",".join(str(batch) for batch in batches for _ in range(repeats + 1))]
        rows = [json.loads(line) for line in output(self.args, command).splitlines() if line.startswith("{")]
        found = {batch: [row["speed_tg"] for row in rows if row["pl"] == batch][1:] for batch in batches}
        if not all(found.values()):
            raise Unavailable("llama-batched-bench printed no figures")
        return {batch: statistics.median(rates) for batch, rates in found.items()}

    def choose(self, model):
        """Tries the ways. Decode steps are smaller than any micro-batch, so that flash attention is all that there is to choose for them."""
        tried = {figure: {} for figure in FIGURES}
        attention, repeats = ["--flash-attn", ",".join(FLASH_ATTENTION)], min(self.args.repeats, 2)
        for tokens, sizes in MICRO_BATCHES.items():
            flags = ["--n-prompt", tokens, "--n-gen", 0, "--ubatch-size", ",".join(map(str, sizes)), "--repetitions", repeats, "--no-warmup"]
            for row in self.bench(model, *flags, *attention):
                way = {"ubatch": row["n_ubatch"], "attention": attention_of(row)}
                tried[f"prefill_{tokens}_tok_s"][json.dumps(way)] = max(row["samples_ts"])
        for row in self.bench(model, "--n-prompt", 0, "--n-gen", STEPS, "--n-depth", CONTEXT, "--repetitions", repeats, *attention):
            tried["decode_1_tok_s"][json.dumps({"attention": attention_of(row)})] = max(row["samples_ts"])
        for way in FLASH_ATTENTION:
            for batch, rate in self.batched(model, BATCHES[1:], way, repeats).items():
                tried[f"decode_{batch}_tok_s"][json.dumps({"attention": way})] = rate
        self.best[model] = {figure: json.loads(max(ways, key=ways.get)) for figure, ways in tried.items()}

    def measure(self, model, _threads):
        if model not in self.best:
            self.choose(model)
        best, figures = self.best[model], {}

        def one(figure, *flags):
            ways = [part for key, value in best[figure].items() for part in (LLAMA_FLAGS[key], value)]
            [row] = self.bench(model, *flags, "--repetitions", self.args.repeats, *ways)
            figures[figure] = statistics.median(row["samples_ts"])

        for tokens in PROMPTS:
            one(f"prefill_{tokens}_tok_s", "--n-prompt", tokens, "--n-gen", 0)
        one("decode_1_tok_s", "--n-prompt", 0, "--n-gen", STEPS, "--n-depth", CONTEXT)
        for batch in BATCHES[1:]:
            rates = self.batched(model, [batch], best[f"decode_{batch}_tok_s"]["attention"], self.args.repeats)
            figures[f"decode_{batch}_tok_s"] = rates[batch]
        return figures

    def chosen(self, model):
        ways = self.best.get(model, {})
        return ", ".join(f"{short(figure)}: " + " ".join(f"{key} {value}" for key, value in way.items()) for figure, way in ways.items())


def attention_of(row):
    return "on" if row["flash_attn"] in (True, 1, "on") else "off"


class Vllm:
    """One process for all rounds, since it takes a minute to start. Between its turns it waits for a line."""

    def __init__(self, args):
        self.args = args
        environment = vllm_environment(args.vllm, cores(args), args.threads) | in_one_process(cores(args))
        command = [args.vllm / "bin/python", HERE / "bench_vllm.py", args.files["bf16"]]
        self.log = open(args.log, "w", encoding="utf-8")
        self.child = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, env=environment)
        self.since = None
        self.idle = []
        self.answer()
        self.rest()

    def answer(self):
        line = self.child.stdout.readline()
        if not line:
            raise Unavailable(f"vLLM has ended: {self.args.log} says why")
        return json.loads(line)

    def cpu(self):
        ticks = Path(f"/proc/{self.child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")

    def rest(self):
        # Its OpenMP threads spin for a moment after the last parallel region.
        time.sleep(0.5)
        self.since = (time.monotonic(), self.cpu())

    def measure(self, _model, _threads):
        wall, cpu = time.monotonic() - self.since[0], self.cpu() - self.since[1]
        if wall > 1:
            self.idle.append(cpu / wall)
        print(json.dumps({"repeats": self.args.repeats}), file=self.child.stdin, flush=True)
        figures = self.answer()
        self.rest()
        return figures


def in_one_process(cores):
    """The engine in the process that asks: its scheduler, elsewhere a process that never sleeps, takes no core from the threads that compute.

    The other settings are those that vLLM gives to a process of its own: a thread without work spins for 5 ms, which is longer than any gap within a
    measurement, and then sleeps. So nothing is taken from vLLM in its turn, and between its turns nothing from the others.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cores}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def short(figure):
    return figure.removesuffix("_tok_s").replace("_", " ")


def turns(args):
    """(label, side, model, threads) of a round, those that are compared next to each other."""
    for model in args.models:
        name = NAMES[model]
        if args.baton:
            yield f"Baton {name}", "baton", model, args.threads
        if args.llama and "llama" in GOALS[model][0]:
            yield f"llama.cpp {name}", "llama", model, args.threads
        if args.vllm and "vllm" in GOALS[model][0]:
            yield "vLLM BF16", "vllm", "bf16", args.threads
        if args.baton and args.threads > 1:
            yield f"Baton {name}, 1 thread", "baton", model, 1


def measure_all(args):
    """Every figure of every round, by label; and the sides, or why there is none."""
    figures, problems, sides = {}, {}, {}
    for turn in range(args.rounds):
        for label, side, model, threads in turns(args):
            if label in problems:
                continue
            progress(f"round {turn + 1} of {args.rounds}: {label}")
            try:
                if side not in sides:
                    sides[side] = {"baton": Baton, "llama": Llama, "vllm": Vllm}[side](args)
                found = sides[side].measure(model, threads)
            except Unavailable as problem:
                problems[label] = str(problem)
                continue
            for figure in FIGURES:
                figures.setdefault(label, {}).setdefault(figure, []).append(found[figure])
    progress("")
    return figures, problems, sides


def row(label, cells):
    return f"{label:<48}" + "".join(f"{cell:>15}" for cell in cells)


def medians(figures):
    return {label: {figure: statistics.median(rates) for figure, rates in found.items()} for label, found in figures.items()}


def ratios(args, figures):
    """(label, ratio by figure, goal by figure) of everything that has a goal."""
    rivals = {"llama": "llama.cpp", "vllm": "vLLM"}
    for model in args.models:
        against, goals = GOALS[model]
        labels = [label for side in against if (label := f"{rivals[side]} {NAMES['bf16' if side == 'vllm' else model]}") in figures]
        mine = figures.get(f"Baton {NAMES[model]}")
        if mine and labels:
            best = {figure: max(figures[label][figure] for label in labels) for figure in FIGURES}
            title = f"Baton {NAMES[model]} / {'best of ' if len(labels) > 1 else ''}{', '.join(labels)}"
            yield title, {figure: mine[figure] / best[figure] for figure in FIGURES}, dict(zip(FIGURES, goals))
    for model in args.models:
        one, all_of_them = figures.get(f"Baton {NAMES[model]}, 1 thread"), figures.get(f"Baton {NAMES[model]}")
        if one and all_of_them:
            goals = {figure: THREADS_GOAL if args.threads == 2 and figure.startswith("prefill") else None for figure in FIGURES}
            yield f"Baton {NAMES[model]}, {args.threads} threads / 1", {figure: all_of_them[figure] / one[figure] for figure in FIGURES}, goals


def cell(ratio, goal):
    """A ratio, its goal, and whether it is missed."""
    return f"{ratio:.2f}" if goal is None else f"{ratio:.2f} ({'' if ratio >= goal else 'not '}{goal:g})"


NOTES = """Tokens/s, medians of {rounds} rounds of {repeats} runs each; {threads} threads of each side on cores {cores}.
Decode: all sequences together, from {context} tokens of context on. Loading and warming up do not count. In parentheses what is to be reached, with 'not' if it is not.
Baton and llama.cpp compute logits and sample nothing; vLLM schedules and samples, which its API does not leave out."""


def table(args, figures, problems, sides):
    middle = medians(figures)
    lines = [row("", map(short, FIGURES))]
    for label in dict.fromkeys(label for label, *_ in turns(args)):
        if label in middle:
            lines.append(row(label, (f"{middle[label][figure]:.1f}" for figure in FIGURES)))
        if label in problems:
            lines.append(f"{label:<48}  not measured{' any more' if label in middle else ''}: {problems[label]}")
    lines += ["", row("ratios", map(short, FIGURES))]
    for label, found, goals in ratios(args, middle):
        lines.append(row(label, (cell(found[figure], goals[figure]) for figure in FIGURES)))
    lines += ["", NOTES.format(rounds=args.rounds, repeats=args.repeats, threads=args.threads, cores=cores(args), context=CONTEXT)]
    if "llama" in sides:
        lines += [f"llama.cpp's best ways, {NAMES[model]}: {sides['llama'].chosen(model)}" for model in sides["llama"].best]
    if "vllm" in sides and sides["vllm"].idle and (most := max(sides["vllm"].idle)) > MOST_IDLE_CPU:
        lines.append(f"vLLM took {most:.0%} of a core between its turns: the others' figures may be too low.")
    return "\n".join(lines)


def main():
    args = arguments()
    descriptor, args.log = tempfile.mkstemp(prefix="bench-engine-vllm-", suffix=".log")
    os.close(descriptor)
    try:
        figures, problems, sides = measure_all(args)
    finally:
        stop_all()
    if "vLLM BF16" not in problems:
        os.unlink(args.log)
    if not figures and problems:
        sys.exit("\n".join(f"bench-engine: {label}: {problem}" for label, problem in problems.items()))
    print(table(args, figures, problems, sides))
    if args.json:
        idle = sides["vllm"].idle if "vllm" in sides else []
        ways = sides["llama"].best if "llama" in sides else {}
        result = {"threads": args.threads, "figures": figures, "problems": problems, "llama_ways": ways, "vllm_idle_cpu": idle}
        result["ratios"] = {label: found for label, found, _ in ratios(args, medians(figures))}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
