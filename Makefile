# `make` lists what there is. CI calls nothing else.
SHELL := bash
CARGO ?= cargo
# Everything uses the dev profile, which has the settings of release but for ThinLTO, so that nothing is built twice.
BUILD := $(CARGO) build --locked --workspace --bins
BIN := $${CARGO_TARGET_DIR:-target}/debug

.DEFAULT_GOAL := help
.PHONY: help check demo up build test test-long agents test-helm test-image image bench-smoke bench-transfer bench-rdma bench-placement bench-sim-vs-live bench-relay bench-engine bench-serve bench-clients bench-structured sim lint fmt clean-cache

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build the binaries: baton, baton-conductor, baton-prefill, baton-decode
	$(BUILD)

check: ## While working: format, clippy, and the tests that need no model, no other process and no virtual machine; 2 minutes on a warm tree
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) nextest run --locked --workspace --exclude baton-cluster-tests --profile check

demo: ## Fetch the model, build, start a cluster of 2 + 2, show what it does: KV pushed during compute, a cached turn, a killed node; 10 minutes the first time (UP="--set node.transport=tcp" changes it)
	@scripts/demo.sh $(UP)

up: ## Start the same cluster and leave it running; Ctrl-C drains it (UP="--prefill 1 ..." changes it)
	@scripts/up.sh $(UP)

test: ## Fetch the model, build, run every test; SETUP=1 installs missing Debian packages, as root
	@scripts/test.sh

test-long: ## The same, and the tests that take long: fuzzing for 30 minutes is one
	@BATON_TEST_LONG=1 scripts/test.sh

agents: ## Claude Code, Codex, Vercel's AI SDK, litellm and other clients, unmodified, against clusters here: 20 minutes, the first time 2 GB more (ONLY="Codex aider")
	@scripts/agents.sh $(ONLY)

test-helm: ## The Helm chart alone: lint, schemas, switches, wrong values, golden renderings, alerts; a minute (UPDATE=1 writes the renderings anew; PODS=1 also runs its pods: three minutes more, as root)
	@scripts/test-helm.sh

test-image: ## The Dockerfile's steps in chroots made by debootstrap, as root, and a cluster of 1 + 1 from the tree: half an hour (BINARIES=FOLDER leaves out compiling: three minutes)
	@BINARIES="$(BINARIES)" scripts/test-image.sh

image: ## The container image, by docker, podman or buildah: all binaries, with RDMA (IMAGE=baton:TAG, BUILDER=podman; SBOM=FILE writes what is in it)
	@scripts/image.sh

bench-smoke: build ## A minute of ratios against yardsticks in the tree, with floors: has an order of magnitude been lost?
	@python3 scripts/bench_smoke.py

bench-transfer: build ## The transfer engine beside a bare loop, memcpy, iperf3, Mooncake and NIXL: one table (ROUNDS=5 SECONDS_EACH=3)
	@scripts/bench-transfer.sh

bench-rdma: ## The transfer engine over RDMA beside perftest, in a virtual machine with Soft-RoCE (ROUNDS=5 SECONDS_EACH=2)
	@scripts/bench-rdma.sh

bench-placement: ## How long a placement takes among 1,000 nodes
	$(CARGO) bench --locked --package baton-scheduler --bench placement

bench-sim-vs-live: build ## Does the simulator show what a cluster does: 8 + 8 mock processes play 10 minutes of a trace, beside the simulator (TRACE=FILE, SECONDS_OF=600 NODES=8 SPEED=1.6 ...)
	@TRACE="$(TRACE)" scripts/bench-sim-vs-live.sh

bench-relay: build ## Gaps between tokens of many streams through a conductor on one core, and its own part: 2,000 streams, 50,000 tokens per second (STREAMS=2000 STEP_MS=40 NODES=8 ...)
	@scripts/bench-relay.sh

bench-engine: build ## Baton's engine beside llama.cpp and vLLM on this CPU, the same weights: 35 minutes, the first time 10 more and 6 GB (ROUNDS=5 MODELS="q4_1 bf16 q4_0 q8_0" ...)
	@scripts/bench-engine.sh

bench-serve: build ## A cluster of 1 + 1 beside llama-server and vllm serve under the same load: an hour or more, the first time 10 minutes more and 6 GB (RATE=0.4 ...)
	@scripts/bench-serve.sh

bench-clients: build ## `baton bench serve` beside AIPerf, on one cluster of 1 + 1 under the same load: 9 minutes (RATE=2 ...)
	@scripts/bench-clients.sh

bench-structured: build ## What structured output costs: gaps between tokens of 16 answers at a time, free and bound to a JSON schema: 2 minutes (ROUNDS=5)
	@scripts/bench-structured.sh

sim: ## Play a trace through production's scheduling: Baton's policies, Mooncake's and a cache-aware router's at 1 to 4 times its speed (TRACE=FILE, SIM="--jitter 3 ...")
	@test -n "$(TRACE)" || { echo "make sim: TRACE: expected a file, as in make sim TRACE=trace.jsonl" >&2; exit 2; }
	$(CARGO) build --locked --package baton-cli --bins
	@"$(BIN)/baton" simulate --trace "$(TRACE)" --compare pairs --curve 1:4:0.5 --ttft-slo-ms 30000 --tbt-slo-ms 100 $(SIM)

lint: ## Words, the table of untrusted input, format, clippy, licences and sources of dependencies, lock files, rustdoc with its examples
	@scripts/lint.sh

fmt: ## Format everything
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path crates/fuzz/libfuzzer/Cargo.toml

clean-cache: ## Remove the downloaded model, cargo-deny, the tools of bench-transfer, and the engines and files of bench-engine
	rm -rf "$${BATON_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/baton}"
