# Everything runs in a virtual environment of this folder; each target installs what it needs, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS ?= constraints/cpu.txt
MODEL := smollm2-135m-instruct

.PHONY: quickstart test test-fast serve lint proto bench-training clean

quickstart: $(STAMP)  ## fetch the small model, start a server, run both cookbook loops against it
	$(BIN)/opentinker models fetch $(MODEL)
	$(BIN)/python cookbook/quickstart.py

test: $(STAMP) lint  ## the whole suite, slow tests included
	$(BIN)/opentinker models fetch $(MODEL)
	$(BIN)/python -m pytest -q

test-fast: $(STAMP)  ## without the slow tests
	$(BIN)/python -m pytest -q -m "not slow"

serve: $(STAMP)  ## a server on the embedded defaults
	$(BIN)/opentinker models fetch $(MODEL)
	$(BIN)/opentinker serve

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy opentinker_client opentinker_server kernels/opentinker_kernels benchmarks
	$(BIN)/lint-imports
	$(BIN)/buf lint

proto: $(STAMP)  ## regenerate the committed protobuf stubs
	$(BIN)/python proto/generate.py

$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[server,kernels,cookbook,dev]'
	touch $(STAMP)

bench-training: $(STAMP)  ## training beside plain PEFT, in turns; nothing else should run
	$(BIN)/opentinker models fetch $(MODEL)
	$(BIN)/python benchmarks/training.py --profile --json benchmarks/results/training-$$(date +%F).json \
		$(if $(TRL_PYTHON),--trl-python $(TRL_PYTHON))

clean:
	rm -rf $(VENV) build dist *.egg-info
