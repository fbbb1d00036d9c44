# Thin targets; everything they do can be run by hand from .venv.
PYTHON3 ?= python3
PY := .venv/bin/python
UV := .uv/bin/uv
READY := .venv/ready.json
NOJAX := .cache/nojax
JETSTREAM := .cache/jetstream
HF := .cache/hf
TRL := .cache/trl
ARGS ?=

.PHONY: help setup train test test-slow test-nojax test-engines jetstream parity parity-generate bench-model lint \
	kill-test replay starting-checkpoint validate-tasks bench bench-engine bench-train bench-sandbox lock \
	clean memory

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(READY)  ## private environment in .venv, from the locked requirements

$(READY): requirements/uv.txt requirements/all.txt pyproject.toml tools/bootstrap.py
	$(PYTHON3) tools/bootstrap.py

train: $(READY)  ## the quickstart, or ARGS="configs/other.yaml run.steps=3"
	$(PY) -m jaxrl.train $(ARGS)

test: $(READY)  ## everything but the slow suites
	$(PY) -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: $(READY)  ## the slow suites
	$(PY) -m pytest -m slow $(ARGS)

kill-test: $(READY)  ## a small run killed at 20 random moments ends as one that was not; ARGS="--async drain"
	$(PY) -m tools.kill_run $(ARGS)

replay: $(READY)  ## known fixes through the agent loop must earn 1.0: generated tasks, two of each project
	$(PY) -m jaxrl.replay "replay.splits=[train, validation, test]"
	$(PY) -m jaxrl.replay configs/projects.yaml tasks.per_project=2 $(ARGS)

memory: $(READY)  ## bytes per device of the 0.8B node configuration, compiled here; ARGS="configs/other.yaml key=value"
	$(PY) -m tools.memory_report $(or $(ARGS),configs/qwen3_5_0_8b.yaml)

test-nojax: $(NOJAX)/ready.json  ## the parts that promise it, in an environment without JAX
	$(NOJAX)/bin/python -m pytest -p no:cacheprovider tests/project/test_without_jax.py tests/feed $(ARGS)

$(NOJAX)/ready.json: $(READY) requirements/nojax.txt
	$(PYTHON3) tools/bootstrap.py --environment $(NOJAX) --requirements requirements/nojax.txt

jetstream: $(JETSTREAM)/ready.json  ## JetStream's orchestrator drives the engine, in an environment of its own
	$(JETSTREAM)/bin/python -m pytest -p no:cacheprovider tests/engine/test_jetstream.py $(ARGS)

$(JETSTREAM)/ready.json: requirements/uv.txt requirements/jetstream.txt pyproject.toml tools/bootstrap.py
	$(PYTHON3) tools/bootstrap.py --environment $(JETSTREAM) --requirements requirements/jetstream.txt

test-engines: $(READY)  ## sandboxes in dockerd and podman, which this starts on roots of their own (root)
	$(PY) tools/container_engines.py -- $(PY) -m pytest tests/sandbox/test_conformance_engines.py \
		tests/sandbox/test_grading_engines.py $(ARGS)

parity: $(READY) $(HF)/ready  ## the model against Hugging Face on new random weights
	$(PY) tools/parity.py --hf-python $(HF)/bin/python $(ARGS)

parity-generate: $(READY) $(HF)/ready  ## greedy tokens against Hugging Face generate: 3 minutes
	$(PY) tools/parity_generate.py --hf-python $(HF)/bin/python $(ARGS)

bench-model: $(READY) $(HF)/ready  ## the model and the gated delta rule against Hugging Face, about 5 minutes
	$(PY) tools/bench_model.py --hf-python $(HF)/bin/python $(ARGS)

bench-engine: $(READY) $(HF)/ready  ## the generation engine: economy, speed against Hugging Face
	$(PY) tools/bench_engine.py --hf-python $(HF)/bin/python $(ARGS)

bench-train: $(READY) $(TRL)/ready  ## a GRPO step and its update against TRL, about 5 minutes
	$(PY) tools/bench_train.py --trl-python $(TRL)/bin/python $(ARGS)

# By pip: torch's CPU build may come from an index that only pip is configured for.
$(HF)/ready: tools/hf_requirements.txt
	$(PYTHON3) -m venv --clear $(HF)
	$(HF)/bin/python -m pip install --quiet -r tools/hf_requirements.txt
	touch $@

$(TRL)/ready: tools/trl_requirements.txt tools/hf_requirements.txt
	$(PYTHON3) -m venv --clear $(TRL)
	$(TRL)/bin/python -m pip install --quiet -r tools/trl_requirements.txt
	touch $@

lint: $(READY)  ## ruff, pyright, import layers, size report
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright
	.venv/bin/lint-imports --no-cache
	$(PY) tools/size_report.py

starting-checkpoint: $(READY)  ## the quickstart's starting checkpoint anew: about 10 minutes
	$(PY) tools/make_starting_checkpoint.py $(ARGS)

validate-tasks: $(READY)  ## proves every committed project task: about an hour of one core
	$(PY) -m sandbox.tasks validate $(ARGS)

bench: $(READY)  ## kernel benchmarks on this machine
	$(PY) -m kernels.bench $(ARGS)

bench-sandbox: $(READY)  ## sandboxes on this machine: starts, many at once, 10,000 cycles without a leak
	$(PY) tools/bench_sandbox.py $(ARGS)

lock: $(READY)  ## new pins and hashes for every platform
	$(PY) tools/lock.py $(ARGS)

clean:  ## removes what make built (runs/ stays)
	rm -rf .venv .uv .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist
