#!/usr/bin/env bash
# Prints the folder of the official test suite of JSON Schema, a folder per draft. The source of
# PyPI's jsonschema has it. BATON_JSON_SCHEMA_SUITE=/path overrides; BATON_CACHE says where it is
# kept. Exit status 77: it cannot be had here.
set -euo pipefail
version=4.26.0
say() { echo "json-schema-suite: $*" >&2; }

if [[ -n ${BATON_JSON_SCHEMA_SUITE-} ]]; then
  [[ -d $BATON_JSON_SCHEMA_SUITE/draft2020-12 ]] ||
    { say "BATON_JSON_SCHEMA_SUITE is '$BATON_JSON_SCHEMA_SUITE', which has no draft2020-12"; exit 2; }
  echo "$BATON_JSON_SCHEMA_SUITE"
  exit
fi
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
folder=$cache/jsonschema-$version/json/tests
if [[ ! -d $folder ]]; then
  mkdir -p "$cache"
  temporary=$(mktemp -d "$cache/json-schema-suite.XXXXXX")
  trap 'rm -rf "$temporary"' EXIT
  say "fetching the source of jsonschema $version out of PyPI"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary=:all: \
    --dest "$temporary" "jsonschema==$version" >&2 || { say "pip cannot fetch it"; exit 77; }
  tar -xzf "$temporary/jsonschema-$version.tar.gz" -C "$temporary"
  rm -rf "$cache/jsonschema-$version"
  mv "$temporary/jsonschema-$version" "$cache/"
fi
echo "$folder"
