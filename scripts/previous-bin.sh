#!/usr/bin/env bash
# Builds the binaries of the commit before this one, and prints their folder: for the test of a
# rolling restart. The first time this takes as long as any first build. BATON_PREVIOUS_BIN=/folder
# overrides; BATON_CACHE says where they are kept. Exit status 77: there is no such commit, as in a
# shallow clone.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "previous-bin: $*" >&2; }

if [[ -n ${BATON_PREVIOUS_BIN-} ]]; then
  [[ -d $BATON_PREVIOUS_BIN ]] || { say "BATON_PREVIOUS_BIN is '$BATON_PREVIOUS_BIN', but there is no such folder"; exit 2; }
  echo "$BATON_PREVIOUS_BIN"
  exit
fi
commit=$(git rev-parse --verify --quiet 'HEAD~1^{commit}') || { say "this clone has no commit before HEAD"; exit 77; }
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}/previous
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
# A worktree: what a checkout leaves alone keeps its time, and is not built again.
git worktree prune
if git -C "$cache/source" rev-parse --verify --quiet HEAD >/dev/null 2>&1; then
  git -C "$cache/source" checkout --quiet --force --detach "$commit"
else
  rm -rf "$cache/source"
  git worktree add --quiet --force --detach "$cache/source" "$commit"
fi
say "building ${commit:0:12} in $cache"
CARGO_TARGET_DIR=$cache/target cargo build --locked --bins --manifest-path "$cache/source/Cargo.toml" \
  --package baton-conductor --package baton-prefill-node --package baton-decode-node >&2
echo "$cache/target/debug"
