#!/usr/bin/env bash
# Installs what the tests need, builds the binaries, runs every test and says how many ran.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! python3 -m pip --version >/dev/null 2>&1; then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -qq -y python3-pip >/dev/null
  else
    echo "test: Python 3 with pip is needed to fetch the model (Debian: apt-get install python3-pip)" >&2
    exit 2
  fi
fi
BATON_MODEL=$(scripts/fetch-model.sh)
export BATON_MODEL
# Larger fixtures, where they are at hand; tests that want them say so when they are not.
if [[ -z ${BATON_FIXTURES-} ]]; then echo "test: BATON_FIXTURES is not set: tests that want large files will say that they skip"; fi

cargo build --release --locked --workspace --bins
log=$(mktemp)
trap 'rm -f "$log"' EXIT
profile=default
[[ -z ${BATON_TEST_LONG-} ]] || profile=long
if cargo nextest --version >/dev/null 2>&1; then
  cargo nextest run --release --locked --workspace --profile "$profile"
else
  echo "test: cargo-nextest is not installed: running with cargo test"
  cargo test --release --locked --workspace --exclude baton-cluster-tests --no-fail-fast 2>&1 | tee "$log"
  cargo test --release --locked --package baton-cluster-tests --no-fail-fast -- --test-threads=1 2>&1 | tee -a "$log"
  awk '/^test result:/ { passed += $4; failed += $6 } END { print passed " passed, " failed " failed" }' "$log"
fi

# What a newcomer runs first, and its answer.
scripts/demo.sh >"$log" 2>&1 || { cat "$log"; echo "test: make demo failed"; exit 1; }
echo "test: make demo answered, and stopped"

# RDMA, in a virtual machine with Soft-RoCE, where this machine can have one.
scripts/test-rdma.sh
