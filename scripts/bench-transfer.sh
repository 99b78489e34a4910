#!/usr/bin/env bash
# The transfer engine, a bare loop, memcpy, iperf3, Mooncake and NIXL compared on this machine. All
# run in turn, several rounds, one table (make bench-transfer).
#
#   SECONDS_EACH   seconds of each measurement        (3)
#   ROUNDS         rounds; the table has medians      (5)
#   WORKING_SET    memory on each side, bytes or MiB  (256MiB)
#   ONLY           a regular expression of rows       (all)
#   JSON           a file for all figures             (none)
#   BENCH_PREFIX   stands before each command         (none; such as "taskset -c 0,1")
#   BATON          the binary                         (target/debug/baton)
# A tool that cannot be had is a line that says so.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
BATON=${BATON:-${CARGO_TARGET_DIR:-target}/debug/baton}
[[ -x $BATON ]] || { echo "bench-transfer: $BATON does not exist: run make build, or make bench-transfer" >&2; exit 2; }
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
venv=$cache/bench-venv
mooncake=mooncake-transfer-engine-non-cuda==0.3.13.post1
# The package nixl itself wants PyTorch and CUDA, which nothing here uses; its libraries are in nixl-cu12.
nixl=nixl-cu12==1.5.1
say() { echo "bench-transfer: $*" >&2; }

tools() {
  command -v iperf3 >/dev/null || install_packages "bench-transfer: iperf3" iperf3 || say "going on without iperf3"
  mkdir -p "$cache"
  exec 9>"$cache/bench-lock"
  flock 9
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv" || { say "no Python environment"; return; }
  local stamp="$venv/installed"
  [[ $(cat "$stamp" 2>/dev/null) == "$mooncake $nixl" ]] && return
  say "installing $mooncake and $nixl into $venv"
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all:)
  "${pip[@]}" numpy || say "numpy cannot be had"
  "${pip[@]}" --no-deps "$mooncake" || say "Mooncake cannot be had"
  "${pip[@]}" --no-deps "$nixl" || say "NIXL cannot be had"
  echo "$mooncake $nixl" >"$stamp"
}

tools
exec python3 scripts/bench_transfer.py --baton "$BATON" --python "$venv/bin/python" \
  --seconds "${SECONDS_EACH:-3}" --rounds "${ROUNDS:-5}" --working-set "${WORKING_SET:-256MiB}" --only "${ONLY:-.}" ${JSON:+--json "$JSON"}
