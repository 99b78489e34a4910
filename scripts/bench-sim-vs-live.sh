#!/usr/bin/env bash
# Does the simulator show what a cluster does? Plays the beginning of a trace against a cluster of mock processes, simulates the same, and prints both (make bench-sim-vs-live).
# Both have all defaults but for what is given here.
#
#   TRACE      the trace                                             (required)
#   SECONDS_OF seconds of the trace's time that are played           (600)
#   SPEED      how many times as fast as recorded                    (1)
#   JITTER     seconds by which arrivals are spread                  (3)
#   SEED       of the jitter, and of the simulator                   (1)
#   TTFT_SLO_MS, TBT_SLO_MS   objectives of every request; both or neither  (none)
#   NODES      nodes of each kind                                    (8)
#   BLOCK      tokens of a KV block                                  (512)
#   PROFILE    what the nodes and the simulator stand for            (llama3-70b-a800)
#   PLACEMENT, ADMISSION   policies of both                          (min-total-delay, value-density)
#   KILL_EVERY seconds from one killed node to the next, as a mean; baton up starts each again (none)
#   LOG_DIR    where the logs of all processes stay                  (none)
#   JSON       a file for all figures                                (none)
set -euo pipefail
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
baton=$target/debug/baton
trace=${TRACE:?a trace is needed, as in make bench-sim-vs-live TRACE=trace.jsonl}
nodes=${NODES:-8} profile=${PROFILE:-llama3-70b-a800} placement=${PLACEMENT:-min-total-delay} admission=${ADMISSION:-value-density} block=${BLOCK:-512}
seconds=${SECONDS_OF:-600} speed=${SPEED:-1} jitter=${JITTER:-3} seed=${SEED:-1}
work=$(mktemp -d)
stop() {
  if [[ -n ${killer:-} ]]; then kill "$killer" 2>/dev/null && wait "$killer" || true; fi
  if [[ -n ${up:-} ]]; then kill -INT "$up" 2>/dev/null && wait "$up" || true; fi
  rm -rf "$work"
}
trap stop EXIT

"$baton" up --engine mock --prefill "$nodes" --decode "$nodes" --threads 1 --grpc 127.0.0.1:0 --http 127.0.0.1:0 --grace 5 \
  --set "conductor.placement=$placement" --set "conductor.admission=$admission" --set "conductor.block_tokens=$block" \
  --set "node.block_tokens=$block" --set "node.mock_profile=$profile" \
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
if [[ -n ${KILL_EVERY:-} ]]; then
  python3 scripts/kill_nodes.py "$up" "$KILL_EVERY" &
  killer=$!
fi
# Both play the same part of the trace. Without objectives, whatever completes is met.
[[ -z ${TBT_SLO_MS:-} || -n ${TTFT_SLO_MS:-} ]] || { echo "bench-sim-vs-live: TTFT_SLO_MS: expected with TBT_SLO_MS" >&2; exit 2; }
if [[ -n ${TTFT_SLO_MS:-} ]]; then
  limits=(--ttft-limit "${TTFT_SLO_MS}ms" --tbt-limit "${TBT_SLO_MS:?expected with TTFT_SLO_MS}ms" --send-limits)
else
  limits=(--ttft-limit 86400s --tbt-limit 86400s)
fi
duration=$(python3 -c 'import sys; print(float(sys.argv[1]) / float(sys.argv[2]))' "$seconds" "$speed")
jitter_of=()
if [[ ! $jitter =~ ^0(\.0*)?$ ]]; then jitter_of=(--jitter "${jitter}s"); fi
"$baton" --json bench serve "grpc://$conductor" --trace "$trace" --duration "${duration}s" --speed "$speed" "${jitter_of[@]}" --seed "$seed" \
  --most-in-flight 10000 --timeout 15m "${limits[@]}" >"$work/live.json"
"$baton" --json simulate --trace "$trace" --duration "$seconds" --speed "$speed" --jitter "$jitter" --seed "$seed" --prefill "$nodes" --decode "$nodes" \
  --model-profile "$profile" --placement "$placement" --admission "$admission" --block-tokens "$block" \
  ${TTFT_SLO_MS:+--ttft-slo-ms "$TTFT_SLO_MS" --tbt-slo-ms "$TBT_SLO_MS"} ${KILL_EVERY:+--fault-every "$KILL_EVERY" --fault kill} >"$work/simulated.json"
python3 scripts/sim_vs_live.py "$work/live.json" "$work/simulated.json" ${JSON:+"$JSON"}
