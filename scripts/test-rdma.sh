#!/usr/bin/env bash
# Installs what the RDMA code is built and tested with, and runs its tests in a virtual machine (scripts/rdma-guest.sh). Where that cannot be had, says so
# and skips. `test-rdma.sh lint` runs clippy on it instead.
set -euo pipefail
cd "$(dirname "$0")/.."
build_packages=(cmake pkg-config libclang-dev libnl-3-dev libnl-route-3-dev libibverbs-dev)
skip() { echo "test-rdma: SKIPPED: $*"; exit 0; }

present() { command -v cmake >/dev/null && pkg-config --exists libibverbs libnl-3.0 libnl-route-3.0 && ls /usr/lib/*/libclang*.so* /usr/lib/llvm-*/lib/libclang*.so* >/dev/null 2>&1; }
if ! present 2>/dev/null; then
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || skip "the build needs ${build_packages[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "${build_packages[@]}"; } >/dev/null 2>&1 ||
    skip "apt-get could not install ${build_packages[*]}"
fi
cargo=(--release --locked --package baton-verbs --features ibverbs)
if [[ ${1-} == lint ]]; then exec cargo clippy "${cargo[@]}" --all-targets -- -D warnings; fi

cargo test "${cargo[@]}" --lib
scripts/rdma-guest.sh --install && scripts/rdma-guest.sh --check || skip "no virtual machine with RDMA devices (the reason is above)"
binary=$(cargo test "${cargo[@]}" --test guest --no-run --message-format=json | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip -o "$stripped" "$binary"
scripts/rdma-guest.sh -f "$stripped:/bin/guest" -- guest --include-ignored --test-threads=1
