#!/usr/bin/env bash
# Builds the RDMA code and runs its tests in a virtual machine with Soft-RoCE (scripts/rdma-guest.sh). Exit status 77: this machine can do neither.
#
#   test-rdma.sh          run the tests
#   test-rdma.sh lint     clippy instead
#   SETUP=1               installs missing Debian packages, as root (CI=true does so too)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
build_packages=(cmake pkg-config libclang-dev libnl-3-dev libnl-route-3-dev libibverbs-dev)

present() { command -v cmake >/dev/null && pkg-config --exists libibverbs libnl-3.0 libnl-route-3.0 && ls /usr/lib/*/libclang*.so* /usr/lib/llvm-*/lib/libclang*.so* >/dev/null 2>&1; }
present 2>/dev/null || install_packages "test-rdma: the headers that RDMA code is built with" "${build_packages[@]}" || exit 77
features=(--locked --package baton-verbs --package baton-transfer-engine --features baton-verbs/ibverbs,baton-transfer-engine/rdma)
if [[ ${1-} == lint ]]; then
  # The nodes, as they are built for hosts with adapters, too.
  nodes=(--package baton-prefill-node --package baton-decode-node --features baton-prefill-node/rdma,baton-decode-node/rdma)
  exec cargo clippy "${features[@]}" "${nodes[@]}" --all-targets -- -D warnings
fi
scripts/rdma-guest.sh --install && scripts/rdma-guest.sh --check || exit 77

# One call builds all, so that nothing is built twice. Then each test binary is found by its target's name.
built=$(cargo test "${features[@]}" --lib --test guest --test adversary --no-run --message-format=json)
binary() { sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" <<<"$built" | tail -n 1; }

"$(binary baton_verbs)" --quiet
"$(binary baton_transfer_engine)" --quiet rdma
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
strip -o "$work/verbs" "$(binary guest)"
strip -o "$work/engine" "$(binary baton_transfer_engine)"
strip -o "$work/adversary" "$(binary adversary)"
# The guest has no environment of its own.
environment=$(env | grep -E '^BATON_TEST_(LONG|SEED)=[0-9]+$' | tr '\n' ' ' || true)
scripts/rdma-guest.sh -t 600 -f "$work/verbs" -f "$work/engine" -f "$work/adversary" -- sh -c \
  "verbs --include-ignored --test-threads=1 && engine rdma --ignored --test-threads=1 && ${environment}adversary over_rdma --ignored --test-threads=1 --nocapture"
