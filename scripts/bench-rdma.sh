#!/usr/bin/env bash
# The transfer engine over RDMA and perftest compared, both in one virtual machine
# (scripts/rdma-guest.sh). Writes run against ib_write_bw, reads against ib_read_bw, in turn,
# several rounds, one table. The rates are those of emulation: only their ratio says something.
#
#   ROUNDS         rounds; the table has medians     (5)
#   SECONDS_EACH   seconds of each measurement, about (2)
#   WORKING_SET    of the engine's ends, each        (256MiB)
#   SIZES          bytes of a block                  ("65536 1048576")
#   OPS            "write", "read" or both           ("write read")
#   FLAGS          more flags of baton bench         (none)
#   BATON          a binary with feature rdma        (built)
set -euo pipefail
cd "$(dirname "$0")/.."
if [[ -z ${BATON-} ]]; then
  # Beside the one without the feature, not over it.
  target=${CARGO_TARGET_DIR:-target}/rdma
  cargo build --locked --package baton-cli --features rdma --target-dir "$target"
  BATON=$target/debug/baton
fi
scripts/rdma-guest.sh --install && scripts/rdma-guest.sh --check || { echo "bench-rdma: no virtual machine with RDMA devices (the reason is above)" >&2; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
strip -o "$work/baton" "$BATON"
cat >"$work/measure" <<GUEST
rounds=${ROUNDS:-5} seconds=${SECONDS_EACH:-2} set=${WORKING_SET:-256MiB} sizes="${SIZES:-65536 1048576}" ops="${OPS:-write read}" flags="${FLAGS-}"
GUEST
cat >>"$work/measure" <<'GUEST'
# Lines for the table: who, operation, size, GB/s (1e9 bytes), and a remark. A failure shows as a line that is no figure.
perftest() { # OP SIZE; a number of messages, as its mode of a duration counts nothing if a queue of 128 takes longer than its margins
  options="-d rxe0 -s $2 -n $((seconds * 96 * 1048576 / $2)) -F --report_gbits"
  "ib_$1_bw" $options >/tmp/server 2>&1 &
  server=$!
  sleep 1
  "ib_$1_bw" $options 10.0.0.1 >/tmp/client 2>&1 || cat /tmp/server /tmp/client
  wait "$server"
  awk -v size="$2" -v op="$1" '$1 == size && NF >= 4 { printf "figure perftest %s %s %.4f -\n", op, size, $4 / 8 }' /tmp/client
}
engine() { # WHO OP SIZE FLAGS
  spans=16; [ "$3" -ge 1048576 ] || spans=100
  baton bench transfer --transport rdma --op "$2" --block-bytes "$3" --spans $spans --working-set "$set" --seconds "$seconds" --json $4 $flags >/tmp/engine 2>&1 || cat /tmp/engine
  sed -n "s/.*\"gb_s\":\([0-9.e-]*\).*\"p50_us\":\([0-9]*\).*\"cpu_seconds_per_gb\":\([0-9.]*\).*/figure $1 $2 $3 \1 p50_us=\2,cpu_s_per_gb=\3/p" /tmp/engine
}
for round in $(seq "$rounds"); do
  for op in $ops; do
    for size in $sizes; do
      perftest $op $size
      engine engine $op $size ""
      engine one-lane $op $size "--lanes 1"
    done
  done
done
GUEST
scripts/rdma-guest.sh -m 2048 -t 1500 -f "$work/baton" -f "$work/measure" -- sh /bin/measure | tee "$work/log" >&2
python3 - "$work/log" <<'TABLE'
import collections, statistics, sys
figures = collections.defaultdict(list)
for line in open(sys.argv[1]):
    words = line.split()
    if len(words) == 6 and words[0] == "figure":
        figures[words[2], int(words[3]), words[1]].append(float(words[4]))
print(f"{'GB/s (1e9 bytes), in the guest':<44}{'median':>9}{'min':>8}{'max':>8}{'x perftest':>12}")
for op, size in dict.fromkeys(key[:2] for key in figures):
    names = {"perftest": f"ib_{op}_bw", "engine": "engine, defaults", "one-lane": "engine, one lane as perftest"}
    if any(not figures[op, size, who] for who in names):
        sys.exit(f"bench-rdma: no figure for {op} of {size} bytes (see the lines above)")
    base = statistics.median(figures[op, size, "perftest"])
    for who, label in names.items():
        found = figures[op, size, who]
        median = statistics.median(found)
        print(f"{op}, {size >> 10} KiB: {label}".ljust(44) + f"{median:>9.4f}{min(found):>8.4f}{max(found):>8.4f}{median / base:>12.2f}")
TABLE
