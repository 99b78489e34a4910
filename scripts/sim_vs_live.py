#!/usr/bin/env python3
"""A report of `baton bench serve` beside one of `baton simulate`, with the ratio of each figure (bench-sim-vs-live).

usage: sim_vs_live.py LIVE SIMULATED [JSON]
"""
import json
import sys

# Figures of the simulator, and what they are in the other report.
FIGURES = {
    "requests": lambda live: live["requests"],
    "completed": lambda live: live["ends"]["met"] + live["ends"]["late"],
    "rejected": lambda live: live["ends"]["rejected_429"] + live["ends"]["rejected_503"],
    "met": lambda live: live["ends"]["met"],
    "late": lambda live: live["ends"]["late"],
    "failed": lambda live: live["ends"]["failed"] + live["ends"]["aborted"] + live["ends"]["not_sent"],
    "ttft_mean_s": lambda live: live["ttft_mean_s"],
    "ttft_p50_s": lambda live: live["ttft_p50_s"],
    "ttft_p90_s": lambda live: live["ttft_p90_s"],
    "ttft_p99_s": lambda live: live["ttft_p99_s"],
    "tbt_mean_s": lambda live: live["tbt_tail_mean_s"],
    "tbt_p50_s": lambda live: live["tbt_tail_p50_s"],
    "tbt_p90_s": lambda live: live["tbt_tail_p90_s"],
    "tbt_p99_s": lambda live: live["tbt_tail_p99_s"],
    "cache_hit_ratio": lambda live: live["cached_tokens"] / max(live["prompt_tokens"], 1),
    "computed_tokens": lambda live: live["prompt_tokens"] - live["cached_tokens"],
}


def shown(value):
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        report = json.load(file)
    with open(sys.argv[2], encoding="utf-8") as file:
        simulated = json.load(file)
    live = {name: figure(report) for name, figure in FIGURES.items()}
    ratio = {name: live[name] / simulated[name] if live[name] is not None and simulated[name] else None for name in FIGURES}
    print(f"{'':22}{'live':>12}{'simulated':>12}{'ratio':>9}")
    for name in FIGURES:
        of = "" if ratio[name] is None else f"{ratio[name]:.3f}"
        print(f"{name:22}{shown(live[name]):>12}{shown(simulated[name]):>12}{of:>9}".rstrip())
    if report["slip_p99_s"] is not None:
        print(f"requests were sent up to {report['slip_p99_s']:.4f} s late (99 %)")
    for reason, count in report["failures"].items():
        print(f"{count} failed: {reason}")
    if len(sys.argv) > 3:
        with open(sys.argv[3], "w", encoding="utf-8") as file:
            json.dump({"live": report | live, "simulated": simulated, "ratio": ratio}, file)


main()
