#!/usr/bin/env bash
# A long prompt, a follow-up, and the death of a node, through a whole cluster on this machine: scripts/demo.py. Arguments go to `baton up`, as in: scripts/demo.sh --set node.transport=tcp
set -euo pipefail
cd "$(dirname "$0")/.."
model=$(scripts/fetch-model.sh)
cargo build --locked --workspace --bins
baton=${CARGO_TARGET_DIR:-target}/debug/baton

work=$(mktemp -d)
up=
stop() {
  [[ -z $up ]] || { kill -TERM "$up" 2>/dev/null && wait "$up" || true; }
  rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM

echo "Starting a conductor, 2 prefill and 2 decode processes${*:+ ($*)} ..."
"$baton" up --model "$model" --prefill 2 --decode 2 --grpc 127.0.0.1:0 --http 127.0.0.1:0 --ready-file "$work/ready.json" --log-dir "$work/logs" "$@" &
up=$!
for _ in $(seq 1200); do
  [[ -s $work/ready.json ]] && break
  kill -0 "$up" 2>/dev/null || { echo "demo: the cluster did not start" >&2; cat "$work"/logs/* >&2; exit 1; }
  sleep 0.1
done
[[ -s $work/ready.json ]] || { echo "demo: the cluster was not ready within 120 s" >&2; exit 1; }
BATON_CONDUCTOR=http://$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["conductor"]["grpc"])' "$work/ready.json")
export BATON_CONDUCTOR

python3 scripts/demo.py "$baton" "$work/ready.json"

printf '\nHow the KV was transferred:\n'
# Nodes report once a second.
sleep 1.2
"$baton" nodes --transport

printf '\nStopping ...\n'
kill -TERM "$up"
wait "$up" || { echo "demo: the cluster did not stop cleanly" >&2; up=; exit 1; }
up=
echo "Done. 'make up' leaves the cluster running; then: baton chat, baton nodes, baton generate --help."
