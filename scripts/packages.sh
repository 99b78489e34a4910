# Debian packages that scripts need; sourced by them. Nothing is installed as root unless the user says so: SETUP=1, or CI=true.

# may_install: whether this script may install packages.
may_install() { [[ ${SETUP-} == 1 || ${CI-} == true ]] && [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; }

# install_packages WHO PACKAGE...: installs them, or says what to do and fails.
install_packages() {
  local who=$1
  shift
  if ! may_install; then
    echo "$who: missing. Run as root with SETUP=1, or: apt-get install --no-install-recommends $*" >&2
    return 1
  fi
  echo "$who: installing $*" >&2
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"; } >/dev/null 2>&1 ||
    { echo "$who: apt-get could not install $*" >&2; return 1; }
}
