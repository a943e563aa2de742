# ebbd: `make` alone lists the targets. Cargo does the work; this file only names common commands.

# rustup puts cargo here, and a shell that was open before does not know.
export PATH := $(or $(CARGO_HOME),$(HOME)/.cargo)/bin:$(PATH)

# The folder of `make run`, and options of one bench, such as `make bench-nbd BENCH="--only qd1_"`;
# those of the memory-pressure test, such as `make bench-memory PRESSURE="--rounds 5"`.
DATA ?= data
BENCH ?=
PRESSURE ?=
# How long `make world` runs, and its first seed.
SECONDS ?= 7200
FROM ?= 100000
TARGET := $(or $(CARGO_TARGET_DIR),target)
SCRIPTS = .ci/run packaging/install-build-deps packaging/run-disk packaging/make-deb packaging/third-party \
    packaging/unit-for-systemd packaging/debian/prerm packaging/debian/postrm testbed/install testbed/debian-image \
    testbed/guests/stranger.sh

.DEFAULT_GOAL := help
.PHONY: help run deb test test-all test-rest models check world fmt bench bench-nbd bench-cache bench-memory bench-writeback bench-outage bench-neighbours bench-limits bench-page bench-xen bench-vhost bench-image bench-rbd bench-encryption clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{ printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Build, and serve a 1 GiB disk from ./data on a unix socket, with the commands to use it
	@packaging/install-build-deps
	@cargo build --locked --release -p ebbd
	@packaging/run-disk "$(TARGET)/release/ebbd" "$(DATA)"

deb: ## A Debian package for this machine's Debian and architecture, in target/debian
	@packaging/install-build-deps --deb
	@cargo build --locked --release -p ebbd
	@packaging/make-deb "$(TARGET)/release/ebbd" "$(TARGET)/debian"

test: ## Format and the quick tests, in minutes; installs what they need; the last line sums up
	@packaging/install-build-deps --check
	cargo fmt --all --check
	@cargo xtask test

test-all: check models ## All that must hold before a change goes in: lints, models, all tests at full scale
	@cargo xtask test --all
	cargo test --locked --quiet --workspace --doc

# After `make test`.
test-rest: check models
	@cargo xtask test --rest
	cargo test --locked --quiet --workspace --doc

models: ## Check all orders of threads of the volume, the memory and the cache, in models
	cargo test --locked -p ebb-volume --features shuttle --lib models
	cargo test --locked -p ebb-mem --features shuttle --lib models
	cargo test --locked -p ebb-cache --features shuttle --lib models

check: ## Format, lints, scripts and dependencies, without the tests
	@packaging/install-build-deps --check
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked -p ebb-volume --features shuttle --all-targets -- -D warnings
	cargo clippy --locked -p ebb-mem --features shuttle --all-targets -- -D warnings
	cargo clippy --locked -p ebb-cache --features shuttle --all-targets -- -D warnings
	shellcheck $(SCRIPTS)
	cargo test --locked --quiet --workspace --test tidy dependencies::

world: ## Whole daemons simulated from seeds, for SECONDS (7200); failing seeds are printed
	EBBD_WORLD_SECONDS=$(SECONDS) EBBD_WORLD_FROM=$(FROM) cargo test --locked -p ebb-world worlds -- --nocapture

fmt: ## Format all Rust code
	cargo fmt --all

bench: bench-memory bench-nbd bench-cache bench-writeback bench-outage bench-neighbours bench-limits bench-page bench-xen bench-vhost bench-image bench-rbd bench-encryption ## Every benchmark

bench-nbd: ## ebbd beside nbdkit and qemu-storage-daemon; figures on stdout, progress on stderr
	@packaging/install-build-deps
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-nbd
	@"$(TARGET)/release/bench-nbd" $(BENCH)

bench-cache: ## The buffer cache before a remote store, beside nbdkit; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-cache --bin bench-cache-guest --bin guest-cache
	@"$(TARGET)/release/bench-cache" $(BENCH)
	@test -n "$(BENCH)" || cargo run --locked --release --quiet -p ebb-cache --example layers-bench
	@test -n "$(BENCH)" || "$(TARGET)/release/bench-cache-guest"

bench-memory: ## Elastic memory beside plain ways to hold it; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@cargo run --locked --release --quiet -p ebb-mem --example mem-bench -- $(BENCH)
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin guest-pressure --bin bench-pressure
	@"$(TARGET)/release/bench-pressure" $(PRESSURE)
	@test -n "$(BENCH)" || cargo build --locked --release --quiet -p ebbd -p testbed --bin ebbd --bin bench-pool
	@test -n "$(BENCH)" || "$(TARGET)/release/bench-pool"

bench-writeback: ## Writeback, simulated and on slow stores, and killed under a guest; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-writeback
	@"$(TARGET)/release/bench-writeback" $(BENCH)

bench-outage: ## Healthy volumes beside dead stores, as root; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-outage
	@"$(TARGET)/release/bench-outage" $(BENCH)
	@test -n "$(BENCH)" || cargo run --locked --release --quiet -p ebb-export-xen --example outage-shm

bench-neighbours: ## A client beside a peer that only begins TLS handshakes; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-neighbours
	@"$(TARGET)/release/bench-neighbours" $(BENCH)

bench-limits: ## Limits, asked and measured, over NBD and shared memory; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-limits
	@"$(TARGET)/release/bench-limits" $(BENCH)
	@test -n "$(BENCH)" || cargo run --locked --release --quiet -p ebb-export-xen --example limit-shm

bench-encryption: ## Encrypted volumes beside plain ones and OpenSSL; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-encryption
	@"$(TARGET)/release/bench-encryption" $(BENCH)

bench-page: ## The page with 5,000 volumes, and the cost of its history; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-page
	@"$(TARGET)/release/bench-page"

bench-xen: ## ebbd beside xen-blkback and QEMU's qdisk on real Xen; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-xen --bin guest-load
	@"$(TARGET)/release/bench-xen" $(BENCH)

bench-vhost: ## ebbd beside qemu-storage-daemon and Cloud Hypervisor over vhost-user-blk; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-vhost --bin vhost-load
	@"$(TARGET)/release/bench-vhost" $(BENCH)

bench-image: ## Copy-on-write overlays beside qemu-nbd and nbdkit's cow filter; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-image
	@"$(TARGET)/release/bench-image" $(BENCH)

bench-rbd: ## The Ceph store beside fio's rbd engine, on a cluster of its own; figures on stdout, progress on stderr
	@packaging/install-build-deps >&2
	@testbed/install >&2
	@cargo build --locked --release -p ebbd -p testbed --bin ebbd --bin bench-rbd
	@"$(TARGET)/release/bench-rbd" $(BENCH)

clean: ## Remove what was built; the disks in ./data stay
	cargo clean
