#!/usr/bin/env bash
# `baton bench serve` and AIPerf (of PyPI, unmodified) on one cluster of 1 + 1 processes. Both send
# the same requests at the same times, in turn. Their figures should agree. Takes 8 minutes.
#
#   RATE       requests per second, at random times  (2)
#   DURATION   seconds of each load                  (30)
#   ROUNDS     rounds; the table has medians         (5)
#   JSON       a file for all figures                (none)
#   BATON      the binary; the others are beside it  (target/debug/baton)
set -euo pipefail
cd "$(dirname "$0")/.."
BATON=${BATON:-${CARGO_TARGET_DIR:-target}/debug/baton}
# The load comes from there, too.
[[ -x $BATON ]] || { echo "bench-clients: $BATON does not exist: run make build" >&2; exit 2; }
packages=(aiperf==0.13.0)
venv=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}/bench-clients
if [[ $(cat "$venv/installed" 2>/dev/null) != "${packages[*]}" ]]; then
  echo "bench-clients: installing ${packages[*]} into $venv" >&2
  rm -rf "$venv"
  python3 -m venv "$venv" >&2
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: "${packages[@]}" >&2
  echo "${packages[*]}" >"$venv/installed"
fi
exec "$venv/bin/python" scripts/bench_clients.py --baton "$BATON" --model "$(scripts/fetch-model.sh)" --rate "${RATE:-2}" --duration "${DURATION:-30}" \
  --rounds "${ROUNDS:-5}" ${JSON:+--json "$JSON"}
