#!/usr/bin/env bash
# One question and a follow-up, through a whole cluster on this machine. Arguments go to `baton up`, as in: scripts/demo.sh --set node.transport=tcp
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

# The first word of the answer leads clearly. Of "What is the capital of France?" two are a tie for this small model, and the lesser one leads astray.
question="Tell me about the capital of France."
follow_up="And which river flows through it?"
printf '\n> %s\n' "$question"
"$baton" generate --timeline --max-tokens 48 "$question" 2>"$work/timeline" | tee "$work/answer" || { cat "$work/timeline" >&2; exit 1; }
printf '\n'
cat "$work/timeline"
grep -q Paris "$work/answer" || { echo "demo: the answer does not name Paris" >&2; exit 1; }

# The follow-up is the same conversation, one turn longer: its prefix is in the cache.
python3 - "$work/answer" "$question" "$follow_up" >"$work/messages.json" <<'PY'
import json, sys
answer = open(sys.argv[1]).read().strip()
roles = ["user", "assistant", "user"]
print(json.dumps([{"role": r, "content": c} for r, c in zip(roles, [sys.argv[2], answer, sys.argv[3]])]))
PY
printf '\n> %s\n' "$follow_up"
"$baton" generate --timeline --max-tokens 48 --messages "$work/messages.json" 2>"$work/timeline"
printf '\n'
cat "$work/timeline"

printf '\nHow the KV was transferred:\n'
# Nodes report once a second.
sleep 1.2
"$baton" nodes --transport

printf '\nStopping ...\n'
kill -TERM "$up"
wait "$up" || { echo "demo: the cluster did not stop cleanly" >&2; up=; exit 1; }
up=
echo "Done. 'make up' leaves the cluster running; then: baton chat, baton nodes, baton generate --help."
