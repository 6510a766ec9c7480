# Shoal's commands. Everything runs from a fresh clone with Python 3.11 or later and make.
BIN := .venv/bin
# Hundreds of processes are started by the tests, and compile all of Shoal each, where this says so.
unexport PYTHONDONTWRITEBYTECODE
KILLS ?= 1000
FAULTS ?= 60
SEEDS ?= 20000
LIVES ?= 5000
CUTS ?= 200
COUNT ?= 20

.DEFAULT_GOAL := help
.PHONY: help setup demo docs test quick test-together test-alone test-engines check format bench bench-engines bench-recovery bench-goodput bench-proxy bench-balancing bench-scaling bench-fairness yardsticks soak long sim lives faults fuzz mutants cuts second-slurm

help: ## print these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name what; do \
	  printf '  make %-10s %s\n' "$$name" "$$what"; done

setup: ## make .venv and install what is missing (the others do this first)
	@scripts/setup

demo: setup ## a cluster of four simulated nodes, jobs, kills and recoveries, in about a minute
	@$(BIN)/python -m examples.demo

docs: ## the documentation as a site with search, in build/site; a broken link fails
	@scripts/setup docs
	@# Not --quiet: then MkDocs counts no warnings, and a broken link passes.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site
	@echo "built; to read it: python3 -m http.server --bind 127.0.0.1 --directory build/site 8000"

test: check test-together test-alone ## everything that must pass: check, then every test (15 minutes on two cores)

quick: setup ## unit, property, golden and contract tests over fakes: for a changed line
	@$(BIN)/python -m pytest tests/unit tests/property tests/golden tests/contract -n 3 --dist worksteal --quiet \
	  --no-header -m "not slow and not serial and not engines and not soak"

test-together: setup
	@scripts/setup engines
	@scripts/side-by-side

test-alone: setup
	@echo "== tests that need the machine for themselves"
	@$(BIN)/python -m pytest -m "serial and not engines" --durations 15 $$(grep -rl --include='test_*.py' mark.serial tests)

test-engines: ## the part of make test over a real Slurm, a real Ray and machines that become a cluster (root)
	@scripts/setup engines
	@$(BIN)/python -m pytest tests -m engines --ignore tests/style

check: setup ## format, ruff, mypy strict, import-linter, style: seconds
	@echo "== format" && $(BIN)/ruff format --check --quiet .
	@echo "== ruff" && $(BIN)/ruff check --quiet .
	@echo "== mypy" && $(BIN)/mypy --no-error-summary
	@echo "== doors and style" && $(BIN)/python -m pytest tests/style --quiet --no-header

format: setup ## let ruff format and mend what it can
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .

bench: ## Shoal beside a real Slurm and a real Ray, in one run
	@scripts/setup bench
	@$(BIN)/python -m benchmarks.submit
	@$(BIN)/python -m benchmarks.idle
	@$(BIN)/python -m benchmarks.listing

bench-engines: ## Shoal over a real Slurm and a real Ray beside what those do by themselves (root, 30 minutes)
	@scripts/setup bench-engines
	@$(BIN)/python -m benchmarks.engines

bench-recovery: ## how long training stands still when a rank or a node is lost: Shoal, torchrun, torchft
	@scripts/setup recovery
	@$(BIN)/python -m benchmarks.recovery
	@$(BIN)/python -m benchmarks.recovery.in_a_row

bench-goodput: setup ## how much of its time a training run keeps under an hour's faults, pressed into minutes
	@$(BIN)/python -m benchmarks.goodput

bench-proxy: ## what a request costs in Shoal's data plane, nginx, HAProxy, Envoy, LLM routers, Ray Serve: 9 minutes
	@scripts/setup proxies
	@$(BIN)/python -m benchmarks.proxy

bench-balancing: setup ## heavy-tailed requests in virtual time through the real balancer and the fair queue
	@$(BIN)/python -m benchmarks.balancing

bench-scaling: setup ## load takes a service from no replica to eight and back; the timeline in build/scaling.png
	@mkdir -p build
	@$(BIN)/python -m benchmarks.scaling --plot build/scaling.png

bench-fairness: setup ## one caller at a hundred times its share, over real sockets: what the others notice
	@$(BIN)/python -m benchmarks.fairness

yardsticks: setup ## published numbers of the field and ours beside them; needs traces: SHOAL_TRACES=dir
	@$(BIN)/python -m benchmarks.yardsticks

soak: setup ## all that takes long: kills, cuts, simulated and drawn lives, faults, planted bugs: make soak KILLS=1000
	@echo "== random kills under mixed load"
	@$(BIN)/python -m tests.soak.run --kills $(KILLS)
	@echo "== a service under fire"
	@$(BIN)/python -m tests.soak.services --faults $(FAULTS)
	@$(MAKE) --no-print-directory long cuts second-slurm sim lives faults mutants

long: ## tests too long for make test, over real engines too (root)
	@scripts/setup engines
	-@scripts/setup bare-debian
	@echo "== long tests"
	@$(BIN)/python -m pytest tests -m "soak and (engines or not engines)" --ignore tests/style --no-header

cuts: ## nodes of a real Slurm and of a real Ray cut off at random while they work (root): make cuts CUTS=200
	@scripts/setup engines
	@echo "== cuts"
	@$(BIN)/python -m tests.soak.cuts --engine slurm --cuts $(CUTS)
	@$(BIN)/python -m tests.soak.cuts --engine ray --cuts $(CUTS)

second-slurm: ## the engine contract over Debian 13's Slurm 24.11, by commands and by REST (root)
	@scripts/setup second-slurm
	@echo "== a second Slurm"
	@SHOAL_TEST_SLURM_ROOT=.cache/second-slurm $(BIN)/python -m pytest -m engines --no-header --quiet \
	  tests/contract/engines/test_slurm.py tests/contract/engines/test_slurm_rest.py tests/contract/engines/test_slurm_transports.py

sim: setup ## crashes, delays and partitions in virtual time: make sim SEEDS=20000
	@echo "== simulated lives"
	@$(BIN)/python -m tests.sim.run --seeds $(SEEDS) --processes 2

lives: setup ## properties by many examples; planners that followed drawn lives beside ones told today: make lives LIVES=5000
	@echo "== properties, and drawn lives of the planner"
	@SHOAL_LIVES=$(LIVES) $(BIN)/python -m pytest tests/property --hypothesis-profile long --timeout 0 --no-header --quiet

faults: setup ## full and read-only disks, no descriptors, clocks that jump
	@echo "== faults"
	@$(BIN)/python -m pytest tests/faults -m "soak or not soak" --no-header --quiet

fuzz: setup ## a minute of coverage-guided fuzzing over what reads HTTP in the data plane
	@echo "== fuzzing"
	@$(BIN)/python -m tests.fuzz.framing

mutants: setup ## plant bugs and see that the suites notice each; random ones: make mutants SEED=1 COUNT=20 ROOMS=scheduler
	@echo "== planted bugs"
	@$(BIN)/python -m $(if $(SEED),tests.mutants.random_bugs --seed $(SEED) --count $(COUNT) $(ROOMS),tests.mutants.run)
