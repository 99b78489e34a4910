#!/usr/bin/env bash
# Prints the path of a Python that has the official clients of OpenAI and Anthropic, gRPC and
# Schemathesis. If there is none, it makes a virtual environment: 200 MB out of PyPI.
# BATON_PYTHON=/path overrides; BATON_CACHE says where it is kept. Exit status 77: they cannot be
# had here.
set -euo pipefail
requirements=$(dirname "$(realpath "$0")")/python-clients.txt
modules=(anthropic grpc grpc_tools openai schemathesis)
say() { echo "python-clients: $*" >&2; }
has_all() { "$1" -c "import ${modules[0]}$(printf ', %s' "${modules[@]:1}")" 2>/dev/null; }

if [[ -n ${BATON_PYTHON-} ]]; then
  has_all "$BATON_PYTHON" || { say "BATON_PYTHON is '$BATON_PYTHON', which cannot import ${modules[*]}"; exit 2; }
  echo "$BATON_PYTHON"
  exit
fi
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
venv=$cache/python-clients
installed() { cmp --quiet "$requirements" "$venv/installed"; }
if ! installed; then
  mkdir -p "$cache"
  exec 9>"$cache/python-clients.lock"
  flock 9
  if ! installed; then
    say "installing $(grep -v '^#' "$requirements" | tr '\n' ' ')into $venv"
    rm -rf "$venv"
    python3 -m venv "$venv" >&2 || { say "python3 makes no virtual environment; Debian has it in python3-venv"; exit 77; }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: --requirement "$requirements" >&2 ||
      { say "pip cannot install them"; exit 77; }
    has_all "$venv/bin/python" || { say "they are installed, but cannot be imported"; exit 77; }
    cp "$requirements" "$venv/installed"
  fi
fi
echo "$venv/bin/python"
