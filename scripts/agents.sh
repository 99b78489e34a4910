#!/usr/bin/env bash
# Runs clients of agents, unmodified, against a cluster on this machine: scripts/agents/run.py says which, and what is
# checked. The first time it installs them from npm and PyPI: 2 GB, some minutes.
#
#   scripts/agents.sh [NAME ...]   these clients alone, as "claude codex"
#   BATON_CACHE                    where they are kept
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
here=$PWD/scripts/agents
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}/agents
say() { echo "agents: $*" >&2; }

node=$(node --version 2>/dev/null || true)
[[ ${node#v} =~ ^(1[8-9]|[2-9][0-9])\. ]] || { say "Node.js 18 or newer is missing (found: ${node:-none})"; exit 2; }
python3 -c 'import ensurepip, venv' 2>/dev/null || install_packages "agents: Python's venv" python3-venv || exit 2
mkdir -p "$cache/node"

if ! cmp --quiet "$here/package.json" "$cache/node/installed"; then
  say "installing clients from npm into $cache/node"
  rm -rf "$cache/node" && mkdir -p "$cache/node"
  cp "$here/package.json" "$cache/node/package.json"
  npm install --silent --no-audit --no-fund --prefix "$cache/node"
  # npm may be set to run no scripts; this one puts Claude Code's binary in place.
  (cd "$cache/node/node_modules/@anthropic-ai/claude-code" && node install.cjs) >&2
  cp "$here/package.json" "$cache/node/installed"
fi
# Some ask for versions of libraries that others do not take.
for venv in clients pydantic-ai aider; do
  cmp --quiet "$here/$venv.txt" "$cache/$venv/installed" && continue
  say "installing clients from PyPI into $cache/$venv"
  rm -rf "${cache:?}/$venv"
  python3 -m venv "$cache/$venv"
  "$cache/$venv/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$here/$venv.txt" >&2
  cp "$here/$venv.txt" "$cache/$venv/installed"
done

model=$(scripts/fetch-model.sh)
cargo build --locked --workspace --bins
exec python3 "$here/run.py" "${CARGO_TARGET_DIR:-target}/debug/baton" "$model" "$cache" "$@"
