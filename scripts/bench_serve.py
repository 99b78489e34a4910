#!/usr/bin/env python3
"""Puts a Baton cluster, llama-server and vllm serve under the same load, in turn. Prints one table: first tokens, gaps, the highest rate each bears."""
import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench_common import Unavailable, add_engines, at_least_1, files, free_port, last_line, progress, run_main, start, stop, stop_all, vllm_environment

# The load: short and long prompts alike often, answers of one length. A request is good within both limits.
PROMPT_CHARS, ANSWER_TOKENS = "300,6000", 64
TTFT_LIMIT, TBT_LIMIT = "5s", "100ms"
# A rate is borne while so many of the requests are good.
GOOD_SHARE = 0.9
# Rates rise by this factor until one is not borne; then the range between is halved until it is narrower than NARROW.
STEP, NARROW = 1.3, 1.1
LOWEST, HIGHEST = 1 / 8, 64.0
# A core each for the two processes of a cluster; a thread on each for the others.
CORES = (0, 1)
# Slots of llama-server, each with room for a long prompt and its answer.
SLOTS, SLOT_TOKENS = 8, 3072
NAMES = {"baton": "Baton 1 + 1, Q4_1", "llama": "llama-server, Q4_1", "vllm": "vllm serve, BF16"}
# What Baton is to reach, against the better of the others.
GOALS = {"tail": 3.0, "ttft": 1.0, "rate": 1.3}
COLUMNS = {
    "ttft_p50_s": ("TTFT p50", lambda s: f"{s:.2f} s"),
    "ttft_p90_s": ("TTFT p90", lambda s: f"{s:.2f} s"),
    "tbt_mean_p50_s": ("TPOT p50", lambda s: f"{s * 1e3:.1f} ms"),
    "tbt_mean_p90_s": ("TPOT p90", lambda s: f"{s * 1e3:.1f} ms"),
    "tbt_tail_p90_s": ("TBT p90", lambda s: f"{s * 1e3:.1f} ms"),
    "goodput_share": ("good", lambda share: f"{share:.0%}"),
    "goodput_per_s": ("goodput", lambda rate: f"{rate:.2f}/s"),
}
# Upper edges of the histogram's bars, seconds.
BARS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BAR_WIDTH = 24


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    add_engines(parser, baton_required=True)
    parser.add_argument("--sides", type=str.split, default=list(NAMES))
    parser.add_argument("--rate", type=above_0, default=0.4)
    parser.add_argument("--duration", type=above_0, default=60.0)
    parser.add_argument("--rounds", type=at_least_1, default=5)
    parser.add_argument("--ramp", type=int, choices=(0, 1), default=1)
    parser.add_argument("--batches", type=lambda text: [at_least_1(part) for part in text.split()], default=[2048])
    parser.add_argument("--baton-api", choices=("http", "grpc"), default="http")
    parser.add_argument("--up", type=shlex.split, default=[], help="more arguments for `baton up`")
    parser.add_argument("--json", type=Path, help="write every figure there")
    args = parser.parse_args()
    args.files = files(args)
    args.sides = [side for side in args.sides if side == "baton" or getattr(args, side)]
    if not args.sides or not args.batches:
        parser.error("no side, or no batch, to measure")
    if os.cpu_count() <= max(CORES):
        parser.error(f"this machine has {os.cpu_count()} core, but 2 are needed")
    return args


def above_0(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}': expected a number above 0")
    return value


class Server:
    """A server from its start to its end, and its URL. What it says goes to a file."""

    def __init__(self, args, work, name):
        self.args, self.work, self.name = args, Path(tempfile.mkdtemp(prefix=f"{name}-", dir=work)), name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.child = None

    def __enter__(self):
        command, environment = self.command()
        # All threads of a server share the two cores, those that compute and those that serve HTTP.
        cores = ",".join(map(str, CORES))
        with open(self.work / "log", "w", encoding="utf-8") as log:
            options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": environment}
            self.child = start(["taskset", "--cpu-list", cores, *command], **options)
        try:
            self.wait_ready()
            self.after_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # A second signal means soon, the third now.
        for patience in (20, 10):
            self.child.terminate()
            try:
                self.child.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        stop(self.child)

    def after_start(self):
        pass

    def wait_ready(self, limit=1200):
        until = time.monotonic() + limit
        while time.monotonic() < until:
            if self.child.poll() is not None:
                raise Unavailable(f"{self.name} ended before it was ready: {self.last_words()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise Unavailable(f"{self.name} was not ready within {limit} s: {self.last_words()}")

    def last_words(self):
        return last_line((self.work / "log").read_text(encoding="utf-8", errors="replace")) or "it said nothing"


class Baton(Server):
    """A prefill and a decode process, each with a core of its own. The conductor has both, as the servers' HTTP has on the other sides."""

    def command(self):
        command = [self.args.baton, "up", "--model", self.args.files["q4_1"], "--prefill", 1, "--decode", 1, "--threads", 1]
        command += ["--http", f"127.0.0.1:{self.port}", "--grpc", "127.0.0.1:0", "--ready-file", self.work / "ready.json", "--log-dir", self.work / "roles"]
        return [*command, "--grace", 5, *self.args.up], None

    def wait_ready(self, limit=1200):
        # The conductor answers before its nodes are there.
        until = time.monotonic() + limit
        while not (self.work / "ready.json").exists():
            if self.child.poll() is not None or time.monotonic() > until:
                raise Unavailable(f"the cluster was not ready: {self.last_words()}")
            time.sleep(0.1)

    def after_start(self):
        roles = json.loads((self.work / "ready.json").read_text())
        if self.args.baton_api == "grpc":
            self.url = f"grpc://{roles['conductor']['grpc']}"
        for core, node in zip(CORES, roles["nodes"]):
            for thread in Path(f"/proc/{node['pid']}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {core})


class Llama(Server):
    def __init__(self, args, work, name, batch):
        super().__init__(args, work, name)
        self.batch = batch

    def command(self):
        threads, micro = len(CORES), min(self.batch, 512)
        command = [self.args.llama / "llama-server", "--model", self.args.files["q4_1"], "--host", "127.0.0.1", "--port", self.port]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", SLOTS, "--ctx-size", SLOTS * SLOT_TOKENS, "--cont-batching"]
        return [*command, "--batch-size", self.batch, "--ubatch-size", micro, "--flash-attn", "on"], None


class Vllm(Server):
    def command(self):
        environment = vllm_environment(self.args.vllm, f"{CORES[0]}-{CORES[-1]}", len(CORES))
        # Chunked prefill and prefix caching are its defaults, and so is how long a chunk is. This is what `vllm serve` starts; the command itself asks for the
        # version of a package that has another name in the build for CPUs, and ends.
        command = [self.args.vllm / "bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", self.args.files["bf16"], "--dtype", "bfloat16"]
        return [*command, "--host", "127.0.0.1", "--port", self.port, "--max-model-len", SLOT_TOKENS], environment


def load(args, url, rate, seed, *flags):
    """What the load generator reports of one load."""
    command = [args.baton, "--json", "bench", "serve", url, "--rate", rate, "--seed", seed, "--prompt-chars", PROMPT_CHARS, "--max-tokens", ANSWER_TOKENS]
    command += ["--ttft-limit", TTFT_LIMIT, "--tbt-limit", TBT_LIMIT, *flags]
    child = start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        text, errors = child.communicate()
    finally:
        stop(child)
    if child.returncode != 0 and not text.strip():
        raise Unavailable(last_line(errors) or "the load generator failed")
    return json.loads(text.strip().splitlines()[-1])


class Bench:
    def __init__(self, args, work):
        self.args, self.work = args, work
        self.batch = args.batches[0]
        self.tried, self.figures, self.problems, self.rates = {}, {}, {}, {}

    def server(self, side, batch=None):
        if side == "llama":
            return Llama(self.args, self.work, "llama-server", batch or self.batch)
        return {"baton": Baton, "vllm": Vllm}[side](self.args, self.work, {"baton": "cluster", "vllm": "vllm"}[side])

    def measure(self, side, rate, seed, batch=None):
        """A load on a server that was started for it. Some requests go before it that do not count, of another seed: nothing of the load is cached."""
        with self.server(side, batch) as server:
            report = load(self.args, server.url, 2, 1_000_003, "--requests", 6)
            if report["ends"]["met"] + report["ends"]["late"] == 0:
                raise Unavailable(f"no request came through: {'; '.join(report['failures'])[:160]}")
            return load(self.args, server.url, rate, seed, "--duration", f"{self.args.duration:g}s")

    def tune(self):
        """The batch with which llama-server serves most requests well at the common rate, and of these the one with the shortest tail of gaps."""
        for batch in self.args.batches if len(self.args.batches) > 1 else []:
            progress(f"llama-server, batch of {batch}")
            self.tried[batch] = self.measure("llama", self.args.rate, 1, batch)
        if self.tried:
            worst = math.inf
            self.batch = min(self.tried, key=lambda batch: (-self.tried[batch]["goodput_share"], self.tried[batch]["tbt_tail_p90_s"] or worst))

    def attempt(self, side, what, when=""):
        """What a side's measurement gives; none if it cannot be, now or before."""
        if side in self.problems:
            return None
        if when:
            progress(f"{when}: {NAMES[side]}")
        try:
            return what()
        except Unavailable as problem:
            self.problems[side] = str(problem)
            return None

    def compare(self):
        for turn in range(self.args.rounds):
            for side in self.args.sides:
                report = self.attempt(side, lambda: self.measure(side, self.args.rate, turn + 1), f"round {turn + 1} of {self.args.rounds}")
                if report:
                    self.figures.setdefault(side, []).append(report)

    def ramp(self):
        """The highest rate that each side bears: all that have not broken yet take the next step one after the other."""
        spans = {}
        for side, reports in self.figures.items():
            borne = statistics.median(report["goodput_share"] for report in reports) >= GOOD_SHARE
            spans[side] = Range(self.args.rate, borne)
        while any(span.next() for span in spans.values()):
            for side, span in spans.items():
                rate = span.next()
                if not rate:
                    continue
                report = self.attempt(side, lambda: self.measure(side, rate, 1), f"{rate:.2f} requests/s")
                if not report:
                    span.give_up()
                    continue
                self.rates.setdefault(side, []).append({"rate": rate, "report": report})
                span.note(rate, report["goodput_share"] >= GOOD_SHARE)
        return {side: span.good for side, span in spans.items() if span.good}


class Range:
    """Between a rate that is borne and one that is not."""

    def __init__(self, rate, borne):
        self.base, self.good, self.bad, self.ended = rate, rate if borne else None, None if borne else rate, False

    def next(self):
        if self.ended:
            return None
        if self.bad is None:
            return self.good * STEP if self.good * STEP <= self.base * HIGHEST else None
        if self.good is None:
            return self.bad / STEP if self.bad / STEP >= self.base * LOWEST else None
        return math.sqrt(self.good * self.bad) if self.bad / self.good > NARROW else None

    def note(self, rate, borne):
        if borne:
            self.good = rate
        else:
            self.bad = rate

    def give_up(self):
        self.ended = True


def medians(reports):
    def middle(key):
        found = [report[key] for report in reports if report[key] is not None]
        return statistics.median(found) if found else None

    return {key: middle(key) for key in COLUMNS}


def row(label, cells):
    return f"{label:<22}" + "".join(f"{cell:>11}" for cell in cells)


def table(args, bench, highest):
    middle = {side: medians(reports) for side, reports in bench.figures.items()}
    lines = [row(f"at {args.rate:g} requests/s", [*(name for name, _ in COLUMNS.values()), "highest"])]
    for side in args.sides:
        if side in middle:
            cells = [show(middle[side][key]) if middle[side][key] is not None else "-" for key, (_, show) in COLUMNS.items()]
            lines.append(row(NAMES[side], [*cells, f"{highest[side]:.2f}/s" if side in highest else "-"]))
        if side in bench.problems:
            lines.append(f"{NAMES[side]:<22}  not measured{' any more' if side in middle else ''}: {bench.problems[side]}")
    return "\n".join([*lines, "", *goals(middle, highest, bench.problems)])


def goals(middle, highest, problems):
    """Baton against the better of the others."""

    def others(of, key=None):
        return [found for side in of if side != "baton" and (found := of[side][key] if key else of[side]) is not None]

    def line(label, ratio, goal):
        return f"{label:<60}{ratio:>7.2f}  (goal: {goal:g}{'' if ratio >= goal else ', not reached'})"

    for key, label, goal in [("tbt_tail_p90_s", "TBT p90: best other / Baton", "tail"), ("ttft_p90_s", "TTFT p90: best other / Baton", "ttft")]:
        rivals = others(middle, key)
        if rivals and middle.get("baton", {}).get(key):
            yield line(label, min(rivals) / middle["baton"][key], GOALS[goal])
    if "baton" in highest and others(highest):
        yield line("highest rate: Baton / best other", highest["baton"] / max(others(highest)), GOALS["rate"])
    elif "baton" in highest and any(side != "baton" and side not in problems for side in middle):
        yield "highest rate: no other bears any"


def histogram(bench):
    """Shares of all gaps between tokens at the common rate, as bars by side."""
    shares = {side: binned(reports) for side, reports in bench.figures.items()}
    lines = ["gaps between tokens   " + "".join(f"{NAMES[side]:<{BAR_WIDTH + 11}}" for side in shares)]
    for index, edge in enumerate([*BARS, math.inf]):
        label = f"above {seconds(BARS[-1])}" if edge == math.inf else f"up to {seconds(edge)}"
        lines.append((f"{label:<22}" + "".join(bar(found[index]) for found in shares.values())).rstrip())
    return "\n".join([*lines, "Bars are logarithmic: a full one is all gaps, and one a fourth as long is one in a thousand."])


def binned(reports):
    counts = [0] * (len(BARS) + 1)
    for report in reports:
        # Every bar's edge is one of the generator's, which has more.
        for edge, count in zip([*report["gaps"]["edges_s"], math.inf], report["gaps"]["counts"]):
            counts[next((index for index, bar in enumerate(BARS) if edge <= bar), len(BARS))] += count
    return [count / (sum(counts) or 1) for count in counts]


def seconds(value):
    return f"{value:g} s" if value >= 1 else f"{value * 1e3:g} ms"


def bar(share):
    length = max(0, round(BAR_WIDTH * (4 + math.log10(share)) / 4)) if share else 0
    return f"{'#' * length:<{BAR_WIDTH}} {f'{share:.2%}' if share else '':<10}"


NOTES = """{rounds} rounds of {duration:g} s, medians; {chars} characters of prompt, {tokens} tokens of answer, times drawn as Poisson's, the same for all.
All on cores {cores}: Baton's two nodes have one each, the others compute with two threads. TPOT is the mean of a request's gaps, TBT the mean of the
longest tenth of them; both over requests. Good: TTFT within {ttft} and TBT within {tbt}. Highest: the rate at which {share:.0%} of the requests are
good still, within {narrow:.0%}; no median, for each rate but {rate:g}/s was measured once."""


def main():
    args = arguments()
    work = tempfile.mkdtemp(prefix="bench-serve-")
    bench, highest = Bench(args, work), {}
    try:
        if "llama" in args.sides:
            bench.attempt("llama", bench.tune)
        bench.compare()
        if args.ramp:
            highest = bench.ramp()
        progress("")
    finally:
        stop_all()
        if bench.problems:
            print(f"bench-serve: what the servers said is in {work}", file=sys.stderr)
        else:
            shutil.rmtree(work)
    if not bench.figures:
        sys.exit("\n".join(f"bench-serve: {NAMES[side]}: {problem}" for side, problem in bench.problems.items()))
    print(table(args, bench, highest))
    print(f"\n{histogram(bench)}\n")
    share, narrow, cores = GOOD_SHARE, NARROW - 1, ",".join(map(str, CORES))
    figures = {"rounds": args.rounds, "duration": args.duration, "chars": PROMPT_CHARS.replace(",", " or "), "tokens": ANSWER_TOKENS, "cores": cores}
    print(NOTES.format(**figures, rate=args.rate, ttft=TTFT_LIMIT, tbt=TBT_LIMIT, share=share, narrow=narrow))
    if bench.tried:
        print(f"llama-server's batch: {bench.batch}, the best of {', '.join(map(str, bench.tried))}.")
    if args.json:
        result = {"batch": bench.batch, "batches": bench.tried, "figures": bench.figures, "rates": bench.rates, "highest": highest, "problems": bench.problems}
        args.json.write_text(json.dumps({"rate": args.rate, "duration_s": args.duration, **result}, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
