#!/usr/bin/env bash
# Carries out the Dockerfile without a container builder. Each stage is a tree made by debootstrap,
# each RUN a chroot with this machine's Rust toolchain. Then the last stage's tree is checked: size,
# what the user may write, tools that only building takes, the SBOM. A cluster of 1 + 1 starts from
# it as the chart starts it: as the image's user, without rights, with a read-only root. It takes
# root and half an hour. Exit status 77: it cannot run here.
#
#   BINARIES      a folder of binaries that were built before, which take the place of compiling: five minutes. Says so at the end
#   BATON_MODEL   the model [default: what scripts/fetch-model.sh fetches]
#   BATON_CACHE   where bases, crates and what was compiled are kept (debootstrap/)
#   SETUP=1       installs missing Debian packages, as root (CI=true does so too)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
say() { echo "test-image: $*" >&2; }
cannot() { say "$*"; exit 77; }

# What is read of a Dockerfile, and that all else is refused.
(cd scripts/test_image && PYTHONDONTWRITEBYTECODE=1 python3 -m unittest --quiet test_dockerfile)

[[ $(id -u) == 0 ]] || cannot "needs root, for chroot and mounts"
[[ $(uname -sm) == "Linux x86_64" ]] || cannot "the image is for Linux on x86-64"
command -v apt-get >/dev/null || cannot "needs apt's lists of Debian's mirrors"
missing=()
for tool in debootstrap:debootstrap setpriv:util-linux ip:iproute2 dpkg-query:dpkg; do
  command -v "${tool%:*}" >/dev/null || missing+=("${tool#*:}")
done
[[ -f /usr/share/keyrings/debian-archive-keyring.gpg ]] || missing+=(debian-archive-keyring)
((${#missing[@]} == 0)) || install_packages "test-image: ${missing[*]}" "${missing[@]}" || exit 77
unshare --mount --pid --net --fork --mount-proc true 2>/dev/null || cannot "may not make namespaces here"
[[ -n $(apt-get indextargets 'Created-By: Packages' 2>/dev/null) ]] || ! may_install || apt-get update -qq >/dev/null 2>&1 || true

model=$(realpath "$(scripts/fetch-model.sh)")
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}/debootstrap
work=$cache/work
mkdir -p "$cache"
exec 9>"$cache.lock"
flock 9
# The lock is ours, so this is of a run that was killed.
rm -rf "$work"
mkdir "$work"

child=
finish() {
  # All mounts and processes are in its namespaces, and end with it. So nothing of this machine is below $work now.
  [[ -z $child ]] || { kill -KILL "$child" 2>/dev/null && wait "$child" 2>/dev/null || true; }
  rm -rf "$work"
}
trap finish EXIT
trap 'exit 130' INT TERM
arguments=(--work "$work" --cache "$cache" --model "$model" --version "$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)"
  --revision "$(git rev-parse HEAD 2>/dev/null || echo unknown)")
[[ -z ${BINARIES-} ]] || arguments+=(--binaries "$(realpath "$BINARIES")")
# The end of this script ends all that it started.
PYTHONDONTWRITEBYTECODE=1 setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc --propagation private \
  python3 scripts/test_image run "${arguments[@]}" &
child=$!
wait "$child" && status=0 || status=$?
child=
exit "$status"
