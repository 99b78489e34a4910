#!/usr/bin/env bash
# Builds the container image. Exit status 77: there is no builder here.
#
#   IMAGE     its name [default: baton:VERSION, as the chart asks for]
#   BUILDER   docker, podman or buildah [default: the first that answers]
#   SBOM      a file, for the list of what is in it; the image has it in /usr/share/doc/baton
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
image=${IMAGE:-baton:$version}
if [[ -z ${BUILDER-} ]]; then
  for BUILDER in docker podman buildah ""; do
    if [[ -n $BUILDER ]] && "$BUILDER" info >/dev/null 2>&1; then break; fi
  done
fi
[[ -n $BUILDER ]] || { echo "image: neither docker, podman nor buildah answers here" >&2; exit 77; }

# in_image COMMAND...: runs it as the image's user.
case $BUILDER in
  *buildah)
    "$BUILDER" build --help >/dev/null 2>&1 && build=build || build=bud
    in_image() {
      local container status=0
      container=$("$BUILDER" from --pull-never "$image")
      "$BUILDER" run "$container" "$@" || status=$?
      "$BUILDER" rm "$container" >/dev/null
      return "$status"
    }
    ;;
  *)
    build=build
    in_image() { "$BUILDER" run --rm --read-only --cap-drop ALL "$image" "$@"; }
    ;;
esac

revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
DOCKER_BUILDKIT=1 "$BUILDER" "$build" --platform linux/amd64 --build-arg "VERSION=$version" --build-arg "REVISION=$revision" --tag "$image" .
[[ $(in_image id -u) == 10001 ]] || { echo "image: it does not run as user 10001" >&2; exit 1; }
in_image baton-conductor --engine mock --print-config >/dev/null
for role in prefill decode; do in_image "baton-$role" --version; done
[[ -z ${SBOM-} ]] || in_image cat /usr/share/doc/baton/sbom.cdx.json >"$SBOM"
echo "built $image"
