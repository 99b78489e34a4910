#!/usr/bin/env bash
# Lets libFuzzer search for inputs that break what Baton reads from outside: each target of crates/fuzz in turn.
#
#   scripts/fuzz.sh [SECONDS_IN_ALL]   60 by default, without the build
#   FUZZ_TARGETS="proto gguf"          only these
#
# Status 1: something was found, and the last lines say where. Status 77: no C++ compiler.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz: '$seconds': expected seconds" >&2; exit 2; }
command -v "${CXX:-c++}" >/dev/null || { echo "fuzz: libFuzzer is C++, and there is no compiler for it (Debian: g++)" >&2; exit 77; }
read -ra targets <<<"${FUZZ_TARGETS:-$(awk -F'"' '/^        name: "/ { printf "%s ", $2 }' crates/fuzz/src/targets/mod.rs)}"
folder=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
build=${CARGO_TARGET_DIR:-$PWD/target}/libfuzzer

# Coverage by LLVM's own pass: stable Rust has no flag for it. `--target` keeps it out of build scripts.
host=$(rustc -vV | sed -n 's/^host: //p')
coverage="-Cpasses=sancov-module"
for option in level=4 inline-8bit-counters pc-table trace-compares; do coverage+=" -Cllvm-args=-sanitizer-coverage-$option"; done
RUSTFLAGS="$coverage" CARGO_TARGET_DIR=$build \
  cargo build --locked --release --target "$host" --manifest-path crates/fuzz/libfuzzer/Cargo.toml
fuzzer=$build/$host/release/baton-libfuzzer

# A backtrace is longer than what matters; the input shows it again.
export RUST_BACKTRACE=0
each=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]}))
found=()
for target in "${targets[@]}"; do
  export BATON_FUZZ_TARGET=$target
  work=$folder/$target
  mkdir -p "$work/corpus" "$work/found"
  rm -f "$work"/found/*
  BATON_FUZZ_SEEDS=$work "$fuzzer" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  inputs=("$work/corpus" "$work/seeds")
  [[ ! -d crates/fuzz/findings/$target ]] || inputs+=("crates/fuzz/findings/$target")
  echo "fuzz: $target: $each s"
  # The target's own bounds of memory and time are tighter; these hold for what they do not see.
  if ! "$fuzzer" -max_total_time="$each" -timeout=60 -rss_limit_mb=3072 -max_len=16384 -dict="$work/words" \
    -artifact_prefix="$work/found/" -print_final_stats=1 -verbosity=1 "${inputs[@]}" >"$work/log" 2>&1; then
    found+=("$target")
    grep -E -A 2 'panicked at|^fuzz: |ERROR|SUMMARY' "$work/log" | tail -n 30
  fi
  # The last of libFuzzer's lines with coverage, and its count of inputs.
  grep -E 'cov: [0-9]+' "$work/log" | tail -n 1 | sed -E 's/^#[0-9]+[[:space:]]+[^ ]+ +/  /' || true
  grep -E '^stat::(number_of_executed_units|average_exec_per_sec|peak_rss_mb)' "$work/log" | sed 's/^stat::/  /' || true
done

for target in "${found[@]}"; do
  echo "fuzz: FOUND: $target: $(ls "$folder/$target"/found/* 2>/dev/null | tr '\n' ' ')"
  echo "  again: BATON_FUZZ_TARGET=$target $fuzzer FILE"
  echo "  for ever: put FILE into crates/fuzz/findings/$target/, then cargo nextest run --package baton-fuzz"
done
[[ ${#found[@]} == 0 ]]
