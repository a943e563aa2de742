# ebbd: `make` alone lists the targets. Cargo does the work; this file only names common commands.

# rustup puts cargo here, and a shell that was open before does not know.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

# The folder of `make run`, and the address of its page.
DATA ?= data
WEB ?= localhost:9477
# Options of one bench, such as `make bench-nbd BENCH="--only qd1_"`;
# those of the memory-pressure test, such as `make bench-memory PRESSURE="--rounds 5"`.
BENCH ?=
PRESSURE ?=
# How long `make world` runs, and its first seed.
SECONDS ?= 7200
FROM ?= 100000
TARGET := $(or $(CARGO_TARGET_DIR),target)
SCRIPTS = .ci/run packaging/check-dependencies packaging/install-build-deps packaging/install-lint-tools \
    packaging/run-disk packaging/make-deb packaging/third-party packaging/unit-for-systemd \
    packaging/debian/prerm packaging/debian/postrm testbed/install testbed/debian-image testbed/guests/stranger.sh

# The unit tests with models: the feature changes nothing else.
MODELS = -p ebb-volume -p ebb-mem -p ebb-cache --lib \
    --features ebb-volume/shuttle,ebb-mem/shuttle,ebb-cache/shuttle

# The tool that makes the book (MPL-2.0; no dependency of ebbd), and where links from the book into
# this tree lead.
MDBOOK = 0.5.4
TREE ?= file://$(CURDIR)

BENCHES = nbd cache writeback outage neighbours limits page xen vhost image rbd encryption

.DEFAULT_GOAL := help
.PHONY: help run book demo deb test test-all test-rest counts models check deny world fmt bench bench-memory $(addprefix bench-,$(BENCHES)) clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{ printf "make %-16s %s\n", $$1, $$2 } sub(/^#: /, "")' $(MAKEFILE_LIST)

run: ## Build, and serve a 1 GiB disk from ./data and the page, with the commands to use them
	@packaging/install-build-deps
	@cargo build --locked --profile quick -p ebbd
	@packaging/run-disk "$(TARGET)/quick/ebbd" "$(DATA)" "$(WEB)"

demo: ## In a minute, what the cache does when a program needs its memory: curves here and as an SVG
	@packaging/install-build-deps >&2
	@testbed/install --quick >&2
	@cargo build --locked --profile quick -p ebbd
	@cargo build --locked --profile quick -p testbed --bin guest-cache --bin demo
	@"$(TARGET)/quick/demo"

book: ## The book in docs/book as HTML, in target/book; installs mdBook in target/tools
	@"$(TARGET)/tools/bin/mdbook" --version 2>/dev/null | grep -qF "$(MDBOOK)" || \
	    cargo install mdbook --locked --version "$(MDBOOK)" --root "$(TARGET)/tools"
	@rm -rf "$(TARGET)/book-source"
	@cp -r docs/book "$(TARGET)/book-source"
	@find "$(TARGET)/book-source" -name '*.md' -exec sed -i -E \
	    -e 's#\]\((\.\./){4}#]($(TREE)/#g' -e 's#\]\((\.\./){3}#]($(TREE)/docs/#g' {} +
	@"$(TARGET)/tools/bin/mdbook" build "$(TARGET)/book-source" --dest-dir "$(TARGET)/book"

deb: ## A Debian package for this machine's Debian and architecture, in target/debian
	@packaging/install-build-deps --deb
	@cargo build --locked --release -p ebbd
	@packaging/make-deb "$(TARGET)/release/ebbd" "$(TARGET)/debian"

test: ## Format and the quick tests, in minutes; installs what they need; the last line sums up
	@packaging/install-build-deps --check
	cargo fmt --all --check
	@cargo xtask test

test-all: check deny models counts ## All that must hold before a change goes in: lints, models, all tests at full scale
	@cargo xtask test --all
	cargo test --locked --quiet --workspace --doc

# After `make test`.
test-rest: check deny models counts
	@cargo xtask test --rest
	cargo test --locked --quiet --workspace --doc

counts: ## Count instructions, calls, allocations and copies per request; UPDATE=1 writes the baseline
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --profile counts -p counts
	@"$(TARGET)/counts/counts" $(if $(UPDATE),--update)

models: ## Check all orders of threads of the volume, the memory and the cache, in models
	cargo test --locked $(MODELS) models

check: ## Format, lints, scripts, spelling and the subjects of commits, without the tests
	@packaging/install-build-deps --check
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked $(MODELS) --profile test -- -D warnings
	shellcheck $(SCRIPTS)
	typos=$$(packaging/install-lint-tools typos) && "$$typos"
	@cargo xtask subjects

deny: ## Licences, sources and versions of dependencies; their advisories where the database can be reached
	deny=$$(packaging/install-lint-tools cargo-deny) && packaging/check-dependencies "$$deny"

world: ## Whole daemons simulated from seeds, for SECONDS (7200); failing seeds are printed
	EBBD_WORLD_SECONDS=$(SECONDS) EBBD_WORLD_FROM=$(FROM) cargo test --locked -p ebb-world worlds -- --nocapture

fmt: ## Format all Rust code
	cargo fmt --all

# A bench prints its figures on stdout and progress on stderr; `--help` of its program lists options.
#: make bench-nbd        ebbd beside nbdkit and qemu-storage-daemon
#: make bench-cache      The buffer cache before a remote store, beside nbdkit
#: make bench-memory     Elastic memory beside plain ways to hold it
#: make bench-writeback  Writeback, simulated and on slow stores, and killed under a guest
#: make bench-outage     Healthy volumes beside dead stores, as root
#: make bench-neighbours A client beside a peer that only begins TLS handshakes
#: make bench-limits     Limits, asked and measured, over NBD and shared memory
#: make bench-page       The page with 5,000 volumes, and the cost of its history
#: make bench-xen        ebbd beside xen-blkback and QEMU's qdisk on real Xen
#: make bench-vhost      ebbd beside qemu-storage-daemon and Cloud Hypervisor over vhost-user-blk
#: make bench-image      Copy-on-write overlays beside qemu-nbd and nbdkit's cow filter
#: make bench-rbd        The Ceph store beside fio's rbd engine, on a cluster of its own
#: make bench-encryption Encrypted volumes beside plain ones and OpenSSL
bench: bench-memory $(addprefix bench-,$(BENCHES)) ## Every benchmark

# Programs that a bench starts, and what follows it unless it is asked for some figures only.
PROGRAMS_cache = --bin bench-cache-guest --bin guest-cache
PROGRAMS_xen = --bin guest-load
PROGRAMS_vhost = --bin vhost-load
library = cargo run --locked --release --quiet -p library-benches --bin $(1)
AFTER_cache = $(call library,layers-bench) && "$(TARGET)/release/bench-cache-guest"
AFTER_outage = $(call library,outage-shm)
AFTER_limits = $(call library,limit-shm)

$(addprefix bench-,$(BENCHES)): bench-%:
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-$* $(PROGRAMS_$*)
	@"$(TARGET)/release/bench-$*" $(BENCH)
	@$(if $(BENCH),,$(or $(AFTER_$*),true))

bench-memory:
	@packaging/install-build-deps >&2
	@$(call library,mem-bench) -- $(BENCH)
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin guest-pressure --bin bench-pressure --bin bench-pool
	@"$(TARGET)/release/bench-pressure" $(PRESSURE)
	@test -n "$(BENCH)" || "$(TARGET)/release/bench-pool"

clean: ## Remove what was built; the disks in ./data stay
	cargo clean
