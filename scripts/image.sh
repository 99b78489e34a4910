#!/usr/bin/env bash
# Builds the container image. Exit status 77: there is no builder here.
#
#   IMAGE     its name [default: baton:VERSION, as the chart asks for]
#   BUILDER   docker or podman [default: the one that answers]
#   SBOM      a file, for the list of what is in it; the image has it in /usr/share/doc/baton
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
image=${IMAGE:-baton:$version}
if [[ -z ${BUILDER-} ]]; then
  for BUILDER in docker podman ""; do
    if [[ -n $BUILDER ]] && "$BUILDER" info >/dev/null 2>&1; then break; fi
  done
fi
[[ -n $BUILDER ]] || { echo "image: neither docker nor podman answers here" >&2; exit 77; }

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
DOCKER_BUILDKIT=1 "$BUILDER" build --platform linux/amd64 --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --tag "$image" .
if [[ -n ${SBOM-} ]]; then
  container=$("$BUILDER" create "$image")
  trap '"$BUILDER" rm "$container" >/dev/null' EXIT
  "$BUILDER" cp "$container:/usr/share/doc/baton/sbom.cdx.json" "$SBOM"
fi
# Not root, and nothing is written.
"$BUILDER" run --rm --read-only --cap-drop ALL "$image" baton-conductor --engine mock --print-config >/dev/null
[[ $("$BUILDER" run --rm --read-only --cap-drop ALL "$image" id -u) == 10001 ]]
echo "$image: $("$BUILDER" image inspect --format '{{.Size}}' "$image") bytes"
