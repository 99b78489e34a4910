#!/usr/bin/env bash
# Baton's engine, llama.cpp and vLLM compared on this CPU: the same weights, threads, prompts and
# contexts. All run in turn, several rounds, one table (make bench-engine).
#
#   ROUNDS    rounds; the table has medians                            (5)
#   REPEATS   repeats of each measurement in a round, medians too      (3)
#   THREADS   threads of each side, on the first cores                 (2)
#   MODELS    Q4_1, Q4_0 and Q8_0 files; a folder of BF16 safetensors  ("q4_1 bf16 q4_0 q8_0")
#   SIDES     who is measured                                          ("baton llama vllm")
#   JSON      a file for all figures                                   (none)
#   BATON     the binary                                               (target/debug/baton)
# vLLM reads the folder only, llama.cpp the files only. A side that cannot be had is a line that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
BATON=${BATON:-${CARGO_TARGET_DIR:-target}/debug/baton}
SIDES=${SIDES:-baton llama vllm} MODELS=${MODELS:-q4_1 bf16 q4_0 q8_0}
[[ " $SIDES " != *" baton "* || -x $BATON ]] || { echo "bench-engine: $BATON does not exist: run make build, or make bench-engine" >&2; exit 2; }
arguments=()
for side in $SIDES; do
  case $side in
    baton) arguments+=(--baton "$BATON") ;;
    llama | vllm)
      path=$(scripts/engines.sh "$side") || { echo "bench-engine: going on without $side" >&2; continue; }
      arguments+=("--$side" "${path#*=}")
      ;;
    *) echo "bench-engine: SIDES: '$side': expected baton, llama or vllm" >&2; exit 2 ;;
  esac
done
# vLLM's figures are of the folder, whichever file they stand beside.
[[ " $SIDES " == *" vllm "* && " $MODELS " != *" bf16 "* ]] && files="$MODELS bf16" || files=$MODELS
for model in $files; do
  path=$(scripts/bench-models.sh "$model")
  arguments+=(--file "$path")
done
exec python3 scripts/bench_engine.py "${arguments[@]}" --models "$MODELS" --rounds "${ROUNDS:-5}" --repeats "${REPEATS:-3}" --threads "${THREADS:-2}" \
  ${JSON:+--json "$JSON"}
