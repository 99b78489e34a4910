#!/usr/bin/env bash
# What structured output costs: 16 answers at a time of a cluster of 1 + 1 processes, in turn free
# and bound to a JSON schema. Takes 2 minutes.
#
#   ROUNDS     rounds; the table has medians         (5)
#   BATON      the binary; the others are beside it  (target/debug/baton)
set -euo pipefail
cd "$(dirname "$0")/.."
BATON=${BATON:-${CARGO_TARGET_DIR:-target}/debug/baton}
[[ -x $BATON ]] || { echo "bench-structured: $BATON does not exist: run make build" >&2; exit 2; }
exec python3 scripts/bench_structured.py --baton "$BATON" --model "$(scripts/fetch-model.sh)" --rounds "${ROUNDS:-5}"
