#!/usr/bin/env bash
# Gaps between the tokens of many streams through a conductor on one core (make bench-relay). Mock
# nodes have an even step: what a gap is longer than the step has been added on the way, by the
# conductor, by a node's timer or by the client. The conductor's own part is printed last.
#
#   STREAMS    streams at once                                          (2000)
#   STEP_MS    a decode step; 40 ms and 2,000 streams are 50,000 tokens per second  (40)
#   NODES      decode nodes                                             (8)
#   SECONDS_OF seconds that all streams run together                     (10)
#   CORE       the conductor's core; everything else gets the others    (0)
#   PERF       a file for `perf record` of the conductor                (none)
#   PERF_GRAPH how `perf` finds callers: fp, dwarf                      (fp)
#   PERF_ALL   a file for `perf record` of the whole machine            (none)
#   JSON       prints JSON if it is not empty                           (none)
# Nodes and client share what cores are left. With one, they are late themselves, and the figures
# say more of them than of the conductor. STREAMS=100 shows how much.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${CARGO_TARGET_DIR:-target}/debug
core=${CORE:-0} nodes=${NODES:-8} cores=$(nproc)
others=$(seq -s, 0 $((cores - 1)) | tr , '\n' | grep -vx "$core" | paste -sd, || true)
others=${others:-$core}
work=$(mktemp -d)
pids=()
stop() {
  for pid in "${pids[@]}"; do kill -INT "$pid" 2>/dev/null || true; done
  wait || true
  rm -rf "$work"
}
trap stop EXIT
step=$(python3 -c 'import sys; print(float(sys.argv[1]) / 1e3)' "${STEP_MS:-40}")
cat >"$work/profile.json" <<JSON
{"name": "even", "prefill_base": 0.001, "prefill_per_token": 1e-6, "prefill_per_token_pair": 0.0, "decode_base": $step, "decode_per_sequence": 0.0,
 "decode_per_kv_token": 0.0, "chunk_tokens": 512, "layers": 4, "kv_bytes_per_token": 64, "decode_kv_tokens": 4000000, "cache_tokens": 1000000,
 "max_running": 4096, "network_bytes_per_s": 1e9, "network_latency_s": 0.0, "ssd_bytes_per_s": 1e9, "step_noise": 0.0}
JSON
# Where the first line of $1 that begins with READY says that it listens.
ready() {
  for _ in $(seq 300); do
    grep -q ^READY "$1" 2>/dev/null && { sed -n 's/^READY //p' "$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)["grpc"])'; return; }
    sleep 0.1
  done
  echo "bench-relay: $1 did not start" >&2
  exit 1
}
taskset -c "$core" "$bin/baton-conductor" --engine mock --grpc 127.0.0.1:0 --http 127.0.0.1:0 --admission none --block-tokens 512 --grace-s 1 --log warn >"$work/conductor" &
conductor_pid=$!
pids+=("$conductor_pid")
conductor=$(ready "$work/conductor")
start() {
  taskset -c "$others" "$bin/baton-$1" --engine mock --name "$1-$2" --conductor "http://$conductor" --mock-profile "fitted:$work/profile.json" --block-tokens 512 \
    --grace-s 1 --log warn >"$work/$1-$2" &
  pids+=($!)
}
start prefill 0
for ((i = 0; i < nodes; i++)); do start decode "$i"; done
for file in prefill-0 $(seq -f 'decode-%g' 0 $((nodes - 1))); do ready "$work/$file" >/dev/null; done
sleep 11
if [[ -n ${PERF_ALL:-} ]]; then
  (sleep 9; perf record -q -a -F 299 -o "$PERF_ALL" -- sleep 5 2>/dev/null || true) &
  pids+=($!)
fi
if [[ -n ${PERF:-} ]]; then
  (sleep 8; perf record -q --call-graph=${PERF_GRAPH:-fp} -F 499 -p "$conductor_pid" -o "$PERF" -- sleep 6 2>/dev/null || true) &
  pids+=($!)
fi
# What the conductor says of its own part, once all streams run: the histogram's counts, by the upper edge of each bucket.
http=$(sed -n 's/^READY //p' "$work/conductor" | python3 -c 'import json, sys; print(json.load(sys.stdin)["http"])')
relayed() { curl -s "http://$http/metrics" | sed -n 's/^baton_conductor_relay_seconds_bucket{.*le="\([^"]*\)"} \(.*\)/\1 \2/p' >"$1"; }
(sleep $((${STREAMS:-2000} / 500 + 3)); relayed "$work/relayed-before") &
cpu() { awk '{print ($14 + $15)}' "/proc/$conductor_pid/stat"; }
before=$(cpu)
# 500 streams begin in a second; each is long enough that all run together for SECONDS_OF.
tokens=$(python3 -c 'import sys; n, s, ms = map(float, sys.argv[1:]); print(round((n * 2 + (3 + s) * 1000) / ms))' "${STREAMS:-2000}" "${SECONDS_OF:-10}" "${STEP_MS:-40}")
taskset -c "$others" "$bin/baton" ${JSON:+--json} bench serve "grpc://$conductor" --rate 500 --requests "${STREAMS:-2000}" --most-in-flight "${STREAMS:-2000}" \
  --prompt-chars 16 --max-tokens "$tokens"
echo "conductor: $(($(cpu) - before)) ticks of CPU from the first stream to the end" >&2
relayed "$work/relayed-after"
python3 - "$work/relayed-before" "$work/relayed-after" <<'PYTHON'
import sys
before, after = ([line.split() for line in open(path)] for path in sys.argv[1:])
edges = [float(edge) for edge, _ in after]
counts = [float(b[1]) - float(a[1]) for a, b in zip(before, after)]
def quantile(q):
    """Upper edge of the bucket that it is in."""
    return next(edge for edge, count in zip(edges, counts) if count >= q * counts[-1]) * 1e3
print(f"conductor's part of {counts[-1]:.0f} tokens, milliseconds at most: " + ", ".join(f"p{q * 100:g} {quantile(q):g}" for q in (0.5, 0.9, 0.99, 0.999)))
PYTHON
