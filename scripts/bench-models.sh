#!/usr/bin/env bash
# The model files of the engines' benches, in the cache: the same weights in several types. Each is
# made once out of the demo's model. Prints lines NAME=PATH. Arguments choose: q4_1, q4_0, q8_0,
# bf16 (all). The last is a folder as on Hugging Face; BATON_MODEL gives another GGUF file to start
# from.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${BATON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/baton}
say() { echo "bench-models: $*" >&2; }
source=$(scripts/fetch-model.sh)
name=$(basename "$source" .gguf)
name=${name%.Q4_1}

# Makes $2, which says how far it has got by its name alone: made under another name first.
quantized() {
  local type=$1 made=$2 engines
  [[ -f $made ]] && return
  engines=$(scripts/engines.sh llama)
  say "making $made"
  "${engines#LLAMA=}/llama-quantize" --allow-requantize "$source" "$made.new" "$type" >"$made.log" 2>&1 || { tail -n 5 "$made.log" >&2; exit 1; }
  mv "$made.new" "$made"
  rm "$made.log"
}

folder() {
  local made=$1 engines
  [[ -f $made/config.json ]] && return
  engines=$(scripts/engines.sh vllm)
  say "making $made"
  rm -rf "$made" "$made.new"
  "${engines#VLLM=}/bin/python" scripts/gguf_to_safetensors.py "$source" "$made.new" >&2
  mv "$made.new" "$made"
}

mkdir -p "$cache"
exec 8>"$cache/models-lock"
flock 8
for model in "${@:-q4_1 q4_0 q8_0 bf16}"; do
  for one in $model; do
    case $one in
      q4_1) made=$source ;;
      q4_0) made=$cache/$name.Q4_0.gguf; quantized Q4_0 "$made" ;;
      q8_0) made=$cache/$name.Q8_0.gguf; quantized Q8_0 "$made" ;;
      bf16) made=$cache/$name-bf16; folder "$made" ;;
      *) say "'$one': expected q4_1, q4_0, q8_0 or bf16"; exit 2 ;;
    esac
    echo "$one=$made"
  done
done
