#!/usr/bin/env bash
# Builds, and starts conductor + 2 prefill + 2 decode processes on the demo model. Arguments go to `baton up`.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$(scripts/fetch-model.sh)
cargo build --locked --workspace --bins
target=${CARGO_TARGET_DIR:-target}
exec "$target/debug/baton" up --model "$model" --prefill 2 --decode 2 "$@"
