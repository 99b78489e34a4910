#!/usr/bin/env bash
# A Baton cluster of 1 + 1 processes, llama-server and vllm serve under the same load, one at a
# time, in turn. Measured are first tokens, gaps between tokens, and the highest rate that each
# bears (make bench-serve).
#
#   RATE       requests per second of the load that all are compared at  (0.4)
#   DURATION   seconds of each load                                      (60)
#   ROUNDS     rounds at that rate; the table has medians                (5)
#   RAMP       0 leaves out the search for the highest rate              (1)
#   SIDES      who is measured                                           ("baton llama vllm")
#   BATCHES    llama-server's batches, of which the best is taken        ("64 128 256 512 2048")
#   BATON_API  how Baton is asked: http, as the others are, or grpc      (http)
#   UP         more arguments for `baton up`                             (none)
#   JSON       a file for all figures                                    (none)
#   BATON      the binary; the others are beside it                      (target/debug/baton)
# Everything takes an hour to an hour and a half, most of it the search for the highest rates of servers that bear none. A side that cannot be had is a line that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
BATON=${BATON:-${CARGO_TARGET_DIR:-target}/debug/baton}
# The load comes from there, too.
[[ -x $BATON ]] || { echo "bench-serve: $BATON does not exist: run make build, or make bench-serve" >&2; exit 2; }
arguments=(--baton "$BATON")
SIDES=${SIDES:-baton llama vllm}
files=q4_1
for side in $SIDES; do
  case $side in
    baton) ;;
    llama | vllm)
      path=$(scripts/engines.sh "$side") || { echo "bench-serve: going on without $side" >&2; continue; }
      arguments+=("--$side" "${path#*=}")
      [[ $side == llama ]] || files+=" bf16"
      ;;
    *) echo "bench-serve: SIDES: '$side': expected baton, llama or vllm" >&2; exit 2 ;;
  esac
done
for model in $files; do
  path=$(scripts/bench-models.sh "$model")
  arguments+=(--file "$path")
done
exec python3 scripts/bench_serve.py "${arguments[@]}" --sides "$SIDES" --rate "${RATE:-0.4}" --duration "${DURATION:-60}" --rounds "${ROUNDS:-5}" \
  --ramp "${RAMP:-1}" --batches "${BATCHES:-64 128 256 512 2048}" --baton-api "${BATON_API:-http}" --up="${UP:-}" ${JSON:+--json "$JSON"}
