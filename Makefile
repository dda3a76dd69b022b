# `make serve` and `make test` need nothing installed but Python 3.11 or newer; install.sh does the rest.
BIN := .venv/bin

.PHONY: serve test lint fmt golden install-dev clean

serve: ## install, prepare the demo model, serve; more flags: make serve ARGS="--port 9000"
	./install.sh $(ARGS)

install-dev:
	./install.sh --dev --no-start

test: install-dev ## all checks and tests
	$(MAKE) lint
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

golden: install-dev ## make the demo model's expected numbers again
	$(BIN)/python -m tools.make_golden

clean: ## everything made here; the demo model stays in the user's cache
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
