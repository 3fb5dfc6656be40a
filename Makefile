# Pagein. `make demo` shows it, `make test` tests it; each sets up what it needs in .venv.
.PHONY: help demo serve test test-unit test-engines test-torch test-wheel lint format docs bench bench-gateway bench-swap bench-state bench-kv bench-weights bench-gpu bench-quality bench-compute-lock bench-scenarios bench-chaos bench-kill bench-endurance clean
.DEFAULT_GOAL := help

PY := .venv/bin/python
SETUP := ./scripts/setup

help:           ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*##/\t/' | expand -t 20

demo:           ## the five-model task on real models, in less memory than they need
	@$(SETUP) demo
	@$(PY) examples/five_models/demo.py

serve:          ## the daemon on the five models, until Ctrl-C
	@$(SETUP) demo
	@.venv/bin/pagein serve examples/five-models.yaml

test: test-unit test-scenarios test-torch test-engines test-wheel   ## every test: fast ones first, the built wheel last

test-unit:      ## the unit suite
	@$(SETUP) dev
	@$(PY) -m pytest -m "not engines and not scenarios and not torch"

test-scenarios: ## real daemons and workers, with a fake engine that misbehaves; processes killed at any moment
	@$(SETUP) dev
	@$(PY) -m pytest -m scenarios

test-torch:     ## tests that compute with torch, then those of models with the oldest transformers that is supported
	@$(SETUP) dev
	@OMP_WAIT_POLICY=passive $(PY) -m pytest -m "torch and not engines"
	@./scripts/test-oldest

test-engines:   ## tests on real engines and weights
	@$(SETUP) dev
	@$(PY) -m pytest -m engines

test-wheel:     ## build the wheel, install it alone in a fresh environment, and use it
	@$(SETUP) dev
	@./scripts/smoke-wheel

lint:           ## ruff, mypy, import contracts, generated pages
	@$(SETUP) dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/lint-imports
	@$(PY) -m pagein.config.render --check
	@$(PY) -m pagein.cli.render --check
	@$(PY) scripts/render_engines.py --check

format:         ## rewrite the code as the linters want it
	@$(SETUP) dev
	@$(PY) -m ruff check --fix . ; $(PY) -m ruff format .

docs:           ## render the generated pages
	@$(SETUP) dev
	@$(PY) -m pagein.config.render
	@$(PY) -m pagein.cli.render
	@$(PY) scripts/render_engines.py

bench: bench-gateway bench-swap   ## every benchmark; results in benchmarks/results/

bench-gateway:  ## added time per request and requests per second, beside a router and a plain reverse proxy
	@$(SETUP) bench
	@$(PY) benchmarks/gateway.py

bench-swap:     ## two models that exclude each other, alternating, beside a router
	@$(SETUP) bench
	@$(PY) benchmarks/swap.py

bench-state:    ## the next turn of a long conversation: never evicted, restored, recomputed
	@$(SETUP) bench
	@$(PY) benchmarks/state.py

bench-kv:       ## twenty long conversations in less memory than their KV: tiers beside transformers' caches (root)
	@$(SETUP) bench
	@OMP_WAIT_POLICY=passive $(PY) benchmarks/kv.py

bench-weights:  ## a model larger than its memory: seconds per token beside AirLLM, accelerate, oLLM, llama.cpp (root)
	@$(SETUP) bench
	@OMP_WAIT_POLICY=passive $(PY) benchmarks/weights.py

bench-parts:    ## a model with eight tasks of which each request needs one, beside full loads, mapped files, hooks, PEFT (root)
	@$(SETUP) bench
	@OMP_WAIT_POLICY=passive $(PY) benchmarks/parts.py

bench-gpu:      ## the same on a CUDA machine, in ten minutes; says so where there is none
	@$(SETUP) bench
	@$(PY) benchmarks/gpu.py

bench-quality:  ## what 8 and 4 bits cost in logits and perplexity
	@$(SETUP) bench
	@$(PY) benchmarks/quality.py models/smollm2-135m-hf

bench-compute-lock: ## what letting heavy models compute one at a time buys and costs
	@$(SETUP) bench
	@$(PY) benchmarks/compute_lock.py

bench-scenarios: ## the situations that break model managers, against Pagein and a router
	@$(SETUP) bench
	@$(PY) benchmarks/run_scenarios.py

bench-chaos:    ## ten minutes of everything that goes wrong, judged from outside
	@$(SETUP) dev
	@$(PY) benchmarks/chaos.py

bench-kill:     ## kill -9 of the daemon at 50 random moments under load
	@$(SETUP) dev
	@$(PY) benchmarks/kill.py

bench-endurance: ## 10,000 requests over five models in room for two
	@$(SETUP) dev
	@$(PY) benchmarks/endurance.py

load-parts:     ## Locust's mixed traffic on a daemon that serves a split model: everything loaded, then parts; table and PNG
	@$(SETUP) load
	@OMP_WAIT_POLICY=passive PYTHONPATH=benchmarks $(PY) -m load

clean:          ## remove everything that was made here
	rm -rf .venv .venv-oldest models .state .cache dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
