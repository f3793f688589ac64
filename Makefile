# Every target builds what it needs. `make VENV=… PYTHON=…` uses another environment or interpreter.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHONS := 3.11 3.12 3.13
PYTHON ?= $(shell tools/find-python 3.11 3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL = $(BIN)/uv pip install --quiet --link-mode copy --compile-bytecode --python $(BIN)/python
# Tests start hundreds of interpreters: one that compiles all it imports takes three times as long to start.
unexport PYTHONDONTWRITEBYTECODE
# One more than the processors that a small machine has: tests wait more than they compute.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# A failure next to other tests may come from load: failed tests are rerun alone, and that result counts.
ALONE = || { [ $$? -eq 1 ] && $(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none
# `make exam` starts servers and cuts connections; with more workers, tests time out while they wait for a processor.
EXAMINERS ?= 5
# Every line and branch of these two has a test; the rest has a bar that only moves up.
PROVEN := src/ergon_framework/clock.py,src/ergon_framework/gates.py,src/ergon_framework/engine/*,src/ergon_framework/task/*,src/ergon_framework/worker/*
TOTAL := 90

.PHONY: help venv check lint types test coverage retest spec docs format bench soak mutants memory deep check-all-pythons wheel constraints snapshot pictures
.PHONY: site reference scan sbom sizes lowest
.PHONY: exam matrix trials signals bench-middleware bench-postgres chaos-postgres chaos-failover power-postgres poison-postgres
.PHONY: chaos-brokers chaos-delays power-brokers bench-tasks bench-brokers broker-peers
.PHONY: bench-providers fleet-providers chaos-memory chaos-outage chaos-full-servers chaos-celery chaos-executors chaos-cron chaos-cron-tasks fuzz-executors bench-executors peers
.PHONY: bench-facts bench-facts-store bench-facts-service bench-artifacts bench-facts-attacks catchup-facts
.PHONY: attack-facts chaos-facts soak-facts power-facts fuzz-facts fuzz-api protos demo demo-chaos

help: ## print every target with one line
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | awk -F '\t' '{printf "%-18s %s\n", $$1, $$2}'

venv: $(STAMP) ## build the environment in $(VENV) from the pinned constraints

# Two steps, because the checkout itself has no hash to check. The built package needs nothing that is not pinned.
$(STAMP): constraints/installer.txt constraints/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints/installer.txt
	$(INSTALL) --require-hashes -r constraints/dev.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	touch $(STAMP)

check: lint types test spec ## the gate: style, types, tests with branch coverage, requirements

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) $(VENV)/.pyright ## mypy, strict, on src; pyright on the programs of tests/typing (needs npm)
	$(BIN)/mypy
	$(BIN)/python tests/typing/run_pyright.py $(VENV)/pyright/index.js

# Pinned by its hash, as what draws the diagrams of the site.
PYRIGHT := pyright-1.1.414
$(VENV)/.pyright: constraints/pyright.sha256 | $(STAMP)
	cd $(VENV) && npm pack --silent $(subst pyright-,pyright@,$(PYRIGHT)) && sha256sum --check ../constraints/pyright.sha256
	mkdir -p $(VENV)/pyright && tar -xzf $(VENV)/$(PYRIGHT).tgz -C $(VENV)/pyright --strip-components 1
	touch $@

# Separate targets: `make exam` stops, kills and disconnects servers for minutes, and each document that is run
# literally has its own wheel, environment and often servers.
EXAMS := $(addprefix tests/conformance/test_,broken.py memory.py facts.py executors.py s3.py)
EXAMS += $(addprefix tests/conformance/test_,postgres.py rabbitmq.py nats.py redis.py)
EXAMS += $(addprefix tests/conformance/test_boundary_,postgres.py service.py)
EXAMS += $(addprefix tests/integration/test_,nats_cluster.py redis_idle.py redis_sentinel.py jobs_cron.py)
EXAMS += $(addprefix tests/integration/test_,s3_contents.py facts_postgres.py replication.py)
EXAMS += $(addprefix tests/integration/test_facts_,access.py service.py)
EXAMS += $(addprefix tests/integration/test_,alerts.py dashboards.py one_trace.py top.py journal.py shop.py)
# Few tests, and half of the time of all: each starts processes, or a server that it treats badly.
EXAMS += $(addprefix tests/integration/test_run,.py _processes.py _many_tasks.py _probes.py _exporting.py _metrics.py)
EXAMS += $(addprefix tests/integration/test_,pause.py doctor.py dlq_edit.py queues_moved.py schema.py)
EXAMS += $(addprefix tests/integration/test_,postgres_outage.py redis_tasks.py jobs_orchestrator.py jobs_executors.py jobs_reported.py)
EXAMS += $(addprefix tests/integration/test_,provider_task_wrapper.py provider_writer.py)
EXAMS += $(addprefix tests/integration/test_facts_,cli.py replicate.py)
EXAMS += $(addprefix tests/integration/test_rabbitmq_,idle.py refusals.py together.py traps.py)
EXAMS += tests/servers/test_postgres.py
# The same suite a second time: the pooler changes little.
# On the current servers, which tools/install-servers --current builds; `make matrix` runs every release.
CURRENT := $(addprefix tests/conformance/test_,postgres.py rabbitmq.py nats.py redis.py)
POOLED := tests/conformance/test_postgres.py::test_postgres_behind_a_pooler
# Too slow for the gate: killed at every step or at a hundred random ones, every call of a store made to fail in turn,
# hundreds of transactions around one that kills, plans by the thousand against real stores.
TRIALS := $(addprefix tests/integration/test_facts_,killed.py consumer_killed.py side_killed.py faults.py)
TRIALS += $(addprefix tests/integration/test_,contents_killed.py dlq_replay_killed.py rabbitmq_killed.py nats_killed.py)
TRIALS += $(addprefix tests/integration/test_jobs_,faults.py chaos.py) $(addprefix tests/integration/test_provider_,fleet.py outage.py)
TRIALS += $(addprefix tests/integration/test_,poison.py three_effects.py postgres_rivals.py new_project.py)
TRIALS += $(addprefix tests/properties/test_,fact_store.py replicas.py) tests/conformance/test_facts_postgres.py
# Compiles the SDK of OpenTelemetry.
TRIALS += tests/conformance/test_rust_otel.py
DOCUMENTS := tests/docs
APART := $(patsubst %,--ignore=%,$(EXAMS) $(TRIALS))
# The engine's rules, in both variants. Noting every line costs as much as the tests themselves, so it is done where it proves most.
RULES := tests/unit/engine tests/unit/worker tests/unit/task tests/unit/cli tests/unit/testing tests/unit/runner tests/unit/telemetry $(wildcard tests/unit/test_*.py) tests/both_drivers
GATE := $(APART) $(DOCUMENTS:%=--ignore=%)
REST := $(GATE) $(RULES:%=--ignore=%)

test: $(STAMP) ## all tests in random order; those of rules with branch coverage, and its bar for engine and task
	$(BIN)/coverage erase
	$(PYTEST) $(RULES) --cov --cov-report= $(ALONE) $(RULES) --cov --cov-append --cov-report=; }
	$(BIN)/coverage report --include='$(PROVEN)' --fail-under=100
	$(PYTEST) -n $(EXAMINERS) $(REST) $(ALONE) $(REST); }

# Random plans run most lines, and are not needed for the bar.
coverage: $(STAMP) ## branch coverage of all tests of the gate, with the bar of the whole
	$(BIN)/coverage erase
	$(PYTEST) -n $(EXAMINERS) $(GATE) --ignore=tests/properties --cov --cov-report= $(ALONE) $(GATE) --cov --cov-append --cov-report=; }
	$(BIN)/coverage report --fail-under=$(TOTAL)

# What is the same under every Python is left out: servers, documents, random plans.
AGAIN := tests/unit tests/both_drivers tests/architecture $(APART)
retest: $(STAMP) ## the tests once more for another interpreter (VENV=… PYTHON=…), without coverage
	$(PYTEST) -q $(AGAIN) $(ALONE) -q $(AGAIN); }

# The oldest versions that pyproject.toml allows, apart from our own environment.
LOWEST := .venv-lowest
$(LOWEST)/.installed: $(STAMP) constraints/lowest.txt pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/uv pip install --quiet --link-mode copy --compile-bytecode --python $(LOWEST)/bin/python \
		--require-hashes -r constraints/lowest.txt
	$(BIN)/uv pip install --quiet --link-mode copy --python $(LOWEST)/bin/python --no-deps --no-build-isolation --editable .
	touch $(LOWEST)/.installed

# Without the tests of our tools, which compare what is installed with constraints/dev.txt.
lowest: $(LOWEST)/.installed ## the unit tests with the lowest allowed version of every direct dependency
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist worksteal -q tests/unit --ignore=tests/unit/tools

spec: $(STAMP) ## each requirement with its tests; fails where a finished group has a hole
	$(BIN)/python tools/spec.py

docs: $(STAMP) ## links, names and words, traces of a machine, and every snippet run against the built wheel
	$(BIN)/python tools/docs.py
	$(BIN)/python tools/check_names.py
	$(BIN)/python tools/hygiene.py
	$(PYTEST) -q tests/docs $(ALONE) -q tests/docs; }

format: $(STAMP) ## let ruff put the files into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

exam: $(STAMP) ## run the conformance suites of connectors, executors and jobs against servers that the tests start
	$(PYTEST) -n $(EXAMINERS) -q $(filter-out $(CURRENT),$(EXAMS)) $(ALONE) -q $(filter-out $(CURRENT),$(EXAMS)); }
	export ERGON_SERVERS=current; \
		$(PYTEST) -n $(EXAMINERS) -q $(CURRENT) --deselect=$(POOLED) $(ALONE) -q $(CURRENT) --deselect=$(POOLED); }

matrix: $(STAMP) ## the conformance suites of the connectors on every release of their servers; about an hour
	$(BIN)/python tests/servers/matrix.py

trials: $(STAMP) ## kills at every step, poison, faults of every call: tests too slow for the gate; a quarter of an hour
	$(PYTEST) -n $(EXAMINERS) -q $(TRIALS) $(POOLED) $(ALONE) -q $(TRIALS) $(POOLED); }

demo: $(STAMP) ## examples/shop: two sites, ORDERS=200 orders from a queue to a ledger, and a check of all records; about a minute
	$(BIN)/python examples/shop/demo.py --orders $(or $(ORDERS),200)

demo-chaos: $(STAMP) ## the same for MINUTES=30 while KILLS=100 times something is killed, stopped, crashed or cut (root)
	$(BIN)/python examples/shop/demo.py --minutes $(or $(MINUTES),30) --kills $(or $(KILLS),100) --seed $(or $(SEED),1)

signals: $(STAMP) ## real processes, every state, every signal
	$(BIN)/python tests/signals/matrix.py

bench-postgres: $(STAMP) ## PostgreSQL beside asyncpg and procrastinate; about 25 minutes
	$(BIN)/python bench/postgres/run.py

bench-tasks: $(STAMP) ## 40 tasks in one process: memory beside 40 processes, one busy task beside running alone
	$(BIN)/python bench/many_tasks.py

bench-providers: $(STAMP) ## what execute adds to a call, and one tenant's health among 10,000,000 attempts
	$(BIN)/python bench/providers/execute.py
	$(BIN)/python bench/providers/postgres.py
	$(BIN)/python bench/providers/summary.py

bench-facts: ## all of facts: the store, the service, artifacts; a bar that is missed keeps no other from being measured
	@$(MAKE) --no-print-directory --keep-going bench-facts-store bench-facts-service bench-artifacts

bench-facts-store: $(STAMP) ## facts in PostgreSQL beside bare inserts, with one writer and with 256
	$(BIN)/python bench/facts/store.py

bench-facts-service: $(STAMP) ## what the facts service adds to its store, over mutual TLS
	$(BIN)/python bench/facts/service.py

bench-facts-attacks: $(STAMP) ## attacks on the facts service, and how an honest caller is served meanwhile; about two minutes
	$(BIN)/python bench/facts/attacks.py

bench-artifacts: $(STAMP) ## artifacts of 2 MiB and of a gigabyte, as files and on S3; about a minute
	$(BIN)/python bench/facts/artifacts.py

catchup-facts: $(STAMP) ## a backlog of FACTS=1000000 facts copied between zones, beside plain copying
	$(BIN)/python bench/facts/catchup.py --facts $(or $(FACTS),1000000)

# RRQ and Celery, apart from our own environment: what they need is theirs.
PEERS := .venv-peers
$(PEERS)/.installed: constraints/peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints/peers.txt
	touch $(PEERS)/.installed

peers: $(PEERS)/.installed ## the environment of RRQ and Celery, for the bench of executors

bench-executors: $(STAMP) $(PEERS)/.installed ## the pool, jobs beside RRQ and Celery, and a backlog; about 6 minutes
	$(BIN)/python bench/executors/run.py

# As the peers above, and apart from them: what they need of the same clients differs.
BROKER_PEERS := .venv-broker-peers
$(BROKER_PEERS)/.installed: constraints/broker-peers.txt
	$(PYTHON) -m venv $(BROKER_PEERS)
	$(BROKER_PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r constraints/broker-peers.txt
	touch $(BROKER_PEERS)/.installed

broker-peers: $(BROKER_PEERS)/.installed ## the environment of the peers of the bench of brokers

bench-brokers: $(STAMP) $(BROKER_PEERS)/.installed ## RabbitMQ, NATS and Redis beside bare clients and peers
	$(BIN)/python bench/brokers/run.py

bench: $(STAMP) ## measure, and print ratios
	$(BIN)/python bench/run.py

bench-middleware: $(STAMP) ## the engine without middleware beside the commit before middleware existed; about two minutes
	$(BIN)/python bench/middleware.py

soak: $(STAMP) ## long random runs against the oracle
	$(BIN)/python tests/properties/soak.py

mutants: $(STAMP) ## break the code on purpose and see which tests notice
	$(BIN)/python tools/mutants.py

soak-facts: $(STAMP) ## 10,000 random plans of two zones and their lines against the oracle, and more with restores
	ERGON_PLANS=160000 $(PYTEST) -q tests/properties/test_replicas.py

memory: $(STAMP) ## measure what is held for how long
	$(BIN)/python bench/memory.py

chaos-postgres: $(STAMP) ## 50,000 transactions through kills, stops, crashes and cuts (root; MINUTES=6)
	$(BIN)/python tests/chaos/postgres.py --minutes $(or $(MINUTES),6)

chaos-failover: $(STAMP) ## 20,000 transactions through 5 promotions of a synchronous standby (root; MINUTES=3, SEED=1)
	$(BIN)/python tests/chaos/failover.py --minutes $(or $(MINUTES),3) --seed $(or $(SEED),1)

power-postgres: $(STAMP) ## what a power loss leaves of confirmed dispatches (root; needs xfsprogs)
	$(BIN)/python tests/chaos/power.py

power-brokers: $(STAMP) ## what a power loss leaves of dispatches that brokers confirmed (root; needs xfsprogs)
	$(BIN)/python tests/chaos/power_brokers.py

power-facts: $(STAMP) ## what a power loss leaves of confirmed facts and artifacts (root; needs xfsprogs)
	$(BIN)/python tests/chaos/power_facts.py

poison-postgres: $(STAMP) ## one transaction that ends every process, among 500
	$(BIN)/python -m pytest -q tests/integration/test_poison.py -k postgres

chaos-brokers: $(STAMP) ## 20,000 transactions on each broker through kills, stops, crashes and cuts (root; MINUTES=5, SEED=1)
	$(BIN)/python tests/chaos/brokers.py --minutes $(or $(MINUTES),5) --seed $(or $(SEED),1)

chaos-delays: $(STAMP) ## 20,000 delayed transactions on each broker, due within a minute, and a killed server; about 13 minutes
	$(BIN)/python tests/chaos/delays.py

chaos-memory: $(STAMP) ## a message larger than its worker's memory, under a memory cgroup, on each broker (root); about 7 minutes
	$(BIN)/python tests/chaos/memory.py

chaos-outage: $(STAMP) ## a provider answers 503 or hangs for a minute, facts are away for five; no dead letter; about 7 minutes
	$(BIN)/python tests/chaos/provider_outage.py

chaos-full-servers: $(STAMP) ## PostgreSQL with a full disk and Redis at its memory limit for two minutes (root; SECONDS=120)
	$(BIN)/python tests/chaos/full_servers.py --outage $(or $(SECONDS),120)

chaos-celery: $(STAMP) ## Celery workers, children and RabbitMQ killed; every task ends once (SEED=1)
	$(BIN)/python tests/chaos/celery_run.py --seed $(or $(SEED),1)

chaos-facts: $(STAMP) ## two zones over a line that is cut, reset, delayed and lossy, and kills (root; MINUTES=10, SHARE=1)
	$(BIN)/python tests/chaos/facts/run.py --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10) --share $(or $(SHARE),1)

attack-facts: $(STAMP) ## readers, pairs and uploads without end against the facts service, while an honest zone works
	$(BIN)/python tests/chaos/facts/attacks.py

chaos-cron: $(STAMP) ## two orchestrators, an entry for every second, one of the two killed (SECONDS=600)
	$(BIN)/python tests/chaos/cron.py --seconds $(or $(SECONDS),600) --kills $(or $(KILLS),1)

chaos-cron-tasks: $(STAMP) ## two processes with a schedule of tasks for every second, one of the two killed (SECONDS=600 QUEUE=redis)
	$(BIN)/python tests/chaos/cron_tasks.py --seconds $(or $(SECONDS),600) --kills $(or $(KILLS),1) --queue $(or $(QUEUE),redis)

chaos-executors: $(STAMP) ## 10,000 jobs in three languages through kills and stops (SEED=1); about 6 minutes
	$(BIN)/python tests/chaos/executors.py --seed $(or $(SEED),1)

# The fuzzer is for Linux on x86-64, and nothing else needs it.
$(VENV)/.fuzzer: $(STAMP) constraints/fuzz.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints/fuzz.txt
	touch $(VENV)/.fuzzer

fuzz-executors: $(VENV)/.fuzzer ## both directions of the executor protocol and real processes, each for SECONDS=30; with KEEP=1 runs add up
	$(BIN)/python -m tests.fuzz.executors --seconds $(or $(SECONDS),30) $(if $(KEEP),--keep)

fuzz-facts: $(VENV)/.fuzzer ## requests and answers of the facts service, and the service itself over the network, each for SECONDS=30; with KEEP=1 runs add up
	$(BIN)/python -m tests.fuzz.facts --seconds $(or $(SECONDS),30) $(if $(KEEP),--keep)

fuzz-api: $(STAMP) ## Schemathesis against the provider API with valid and bad tokens, for SECONDS=60
	$(BIN)/python -m tests.fuzz.api --seconds $(or $(SECONDS),60)

fleet-providers: $(STAMP) ## quota, breaker and keys over many processes, some of them killed; about 4 minutes
	$(BIN)/python tests/chaos/providers.py

deep: soak mutants bench memory signals bench-postgres chaos-postgres chaos-failover power-postgres ## all that is too slow for the gate
deep: trials coverage scan sizes bench-providers fleet-providers chaos-outage chaos-full-servers chaos-celery chaos-executors chaos-cron chaos-cron-tasks fuzz-executors bench-executors
deep: bench-brokers chaos-brokers chaos-delays power-brokers
deep: demo-chaos
deep: chaos-facts catchup-facts soak-facts power-facts fuzz-facts fuzz-api bench-facts

check-all-pythons: ## the gate under every supported Python, each with an environment of its own
	@set -e; for version in $(PYTHONS); do \
		echo "== Python $$version"; \
		$(MAKE) --no-print-directory check VENV=.venv-$$version PYTHON="$$(tools/find-python $$version)"; \
	done

wheel: $(STAMP) ## build the wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

protos: $(STAMP) ## regenerate the message code of the facts service
	cd src && $(abspath $(BIN))/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		ergon_framework/facts/service/boundary.proto

# The site, apart from our own environment: what builds it is pinned, and so is what draws its diagrams in a browser.
SITE := .venv-site
MERMAID := mermaid-12.3.0
$(SITE)/.installed: constraints/site.txt constraints/mermaid.sha256
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints/site.txt
	cd $(SITE) && npm pack --silent $(subst mermaid-,mermaid@,$(MERMAID)) && sha256sum --check ../constraints/mermaid.sha256
	tar -xzf $(SITE)/$(MERMAID).tgz -C $(SITE) package/dist/mermaid.min.js
	touch $(SITE)/.installed

site: $(SITE)/.installed ## the documentation site in site/; a broken link or a page outside the menu fails (needs npm)
	$(SITE)/bin/python tools/site.py build/site
	mkdir -p build/site/assets
	cp $(SITE)/package/dist/mermaid.min.js build/site/assets/
	$(SITE)/bin/zensical build --clean --strict

# What looks for secrets and careless code, apart from our own environment too.
SCAN := .venv-scan
$(SCAN)/.installed: constraints/scan.txt
	$(PYTHON) -m venv $(SCAN)
	$(SCAN)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints/scan.txt
	touch $(SCAN)/.installed

scan: $(STAMP) $(SCAN)/.installed ## bandit and detect-secrets; each exception is in tools/scan.toml with its reason
	$(BIN)/python tools/scan.py $(SCAN)/bin

sbom: $(STAMP) ## what the package needs when it runs, as CycloneDX JSON in build/sbom.cdx.json
	$(BIN)/python tools/sbom.py build/sbom.cdx.json

sizes: $(STAMP) ## what each extra costs: packages, megabytes, the time of an import; about two minutes
	$(BIN)/python tools/sizes.py

reference: $(STAMP) ## regenerate docs/reference/ from the commands and the policies
	$(BIN)/python tools/reference.py

pictures: $(STAMP) ## regenerate docs/pictures/: ergon top and the dashboards under load, for SECONDS=60
	$(BIN)/python tools/pictures.py --seconds $(or $(SECONDS),60)

snapshot: $(STAMP) ## regenerate the snapshot of the public names
	$(BIN)/python tools/snapshot.py

PIN = $(BIN)/uv pip compile --universal --generate-hashes --no-header --no-annotate --quiet --upgrade --python-version 3.11
constraints: $(STAMP) ## pin the tools again
	$(BIN)/uv pip compile --universal --generate-hashes --no-header --quiet --upgrade --extra dev --python-version 3.11 \
		--output-file constraints/dev.txt pyproject.toml
	$(BIN)/python tools/lowest.py | $(PIN) --output-file constraints/lowest.txt -
	sed -i '1i # The lowest version of every direct dependency that pyproject.toml allows, with the tools of the unit tests.' constraints/lowest.txt
	echo zensical | $(PIN) --output-file constraints/site.txt -
	sed -i '1i # The documentation site, for Python 3.11 to 3.13; in an environment of its own.' constraints/site.txt
	printf 'bandit\ndetect-secrets\n' | $(PIN) --output-file constraints/scan.txt -
	sed -i '1i # What looks for secrets and careless code, for Python 3.11 to 3.13; in an environment of its own.' constraints/scan.txt
	! grep -n '://' constraints/*.txt
