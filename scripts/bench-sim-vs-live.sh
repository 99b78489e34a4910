#!/usr/bin/env bash
# Does the simulator show what a cluster does? Plays the beginning of a trace against a cluster of mock processes, simulates the same, and prints both (make bench-sim-vs-live).
# Both have all defaults but for what is given here.
#
#   TRACE      the trace                                             (required)
#   SECONDS_OF seconds of the trace's time that are played           (600)
#   NODES      nodes of each kind                                    (8)
#   BLOCK      tokens of a KV block                                  (512)
#   PROFILE    what the nodes and the simulator stand for            (llama3-70b-a800)
#   PLACEMENT, ADMISSION   policies of both                          (min-total-delay, value-density)
#   OPTIONS    options of the trace and objectives, as in "--speed 1.6 --jitter 3 --ttft-slo-ms 30000"  (--jitter 3)
#              (what a cluster is started with, such as --max-wait-ms, would reach the simulator alone)
#   KILL_EVERY seconds from one killed node to the next, as a mean; baton up starts each again (none)
#   LOG_DIR    where the logs of all processes stay                  (none)
#   JSON       a file for all figures                                (none)
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
baton=$target/debug/baton
trace=${TRACE:?a trace is needed, as in make bench-sim-vs-live TRACE=trace.jsonl}
nodes=${NODES:-8} profile=${PROFILE:-llama3-70b-a800} placement=${PLACEMENT:-min-total-delay} admission=${ADMISSION:-value-density} block=${BLOCK:-512}
work=$(mktemp -d)
stop() {
  if [[ -n ${killer:-} ]]; then kill "$killer" 2>/dev/null && wait "$killer" || true; fi
  if [[ -n ${up:-} ]]; then kill -INT "$up" 2>/dev/null && wait "$up" || true; fi
  rm -rf "$work"
}
trap stop EXIT

"$baton" up --engine mock --prefill "$nodes" --decode "$nodes" --block-tokens "$block" --threads 1 --grpc 127.0.0.1:0 --http 127.0.0.1:0 --grace 5 \
  --placement "$placement" --conductor-arg=--admission --conductor-arg="$admission" \
  --prefill-arg=--mock-profile --prefill-arg="$profile" --decode-arg=--mock-profile --decode-arg="$profile" \
  --ready-file "$work/ready.json" ${LOG_DIR:+--log-dir "$LOG_DIR"} >/dev/null &
up=$!
for _ in $(seq 300); do
  [[ -s $work/ready.json ]] && break
  kill -0 "$up" || { echo "bench-sim-vs-live: the cluster did not start" >&2; exit 1; }
  sleep 0.2
done
conductor=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["conductor"]["grpc"])' "$work/ready.json")
# Nodes that have just joined get less than their share; the simulator's have been there for long.
sleep 11
faults=
if [[ -n ${KILL_EVERY:-} ]]; then
  faults="--fault-every $KILL_EVERY --fault kill"
  python3 scripts/kill_nodes.py "$up" "$KILL_EVERY" &
  killer=$!
fi
# shellcheck disable=SC2086 # options are words
"$baton" --conductor "http://$conductor" ${JSON:+--json} bench replay --trace "$trace" --duration "${SECONDS_OF:-600}" --prefill "$nodes" --decode "$nodes" \
  --model-profile "$profile" --placement "$placement" --admission "$admission" \
  --block-tokens "$block" ${OPTIONS:---jitter 3} $faults --compare-sim >"$work/figures"
if [[ -n ${JSON:-} ]]; then cp "$work/figures" "$JSON"; fi
cat "$work/figures"
