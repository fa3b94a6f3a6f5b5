# The commands of README.md and CONTRIBUTING.md. Everything real is in CMake; this only spells the invocations.
JOBS ?= $(shell nproc)
PRESET ?= release

.PHONY: demo test test-sanitize bench fuzz build deps deps-bench deps-fuzz format clean

demo: build
	@mkdir -p out
	build/cli/vcattn compare data/qkv_layer6_4160.safetensors --report out/layer6.html --json out/layer6.json
	build/cli/vcattn compare data/qkv_layer2_16448.safetensors --report out/layer2.html --json out/layer2.json
	@echo "Reports: out/layer2.html and out/layer6.html (the same figures as JSON beside them)"

test: build
	ctest --test-dir build --output-on-failure -j $(JOBS)

build: deps
	cmake --preset release
	cmake --build build -j $(JOBS)

test-sanitize: deps
	cmake --preset sanitize
	cmake --build build-sanitize -j $(JOBS)
	ctest --test-dir build-sanitize --output-on-failure -j $(JOBS)

bench: deps deps-bench
	cmake --preset bench
	cmake --build build-bench -j $(JOBS)
	build-bench/bench/attend_bench

# Three minutes for each reader; FUZZ_SECONDS changes it.
FUZZ_SECONDS ?= 180
fuzz: deps deps-fuzz
	cmake --preset fuzz
	cmake --build build-fuzz -j $(JOBS)
	for reader in safetensors npy; do \
	  mkdir -p out/fuzz/$$reader && build-fuzz/fuzz/$${reader}_fuzz -max_total_time=$(FUZZ_SECONDS) \
	    out/fuzz/$$reader fuzz/corpus/$$reader || exit 1; done

deps:
	@scripts/install_deps.sh build
deps-bench:
	@scripts/install_deps.sh bench
deps-fuzz:
	@scripts/install_deps.sh fuzz

format:
	git ls-files '*.h' '*.hpp' '*.cpp' '*.c' | grep -v '^lab/' | xargs clang-format -i

clean:
	rm -rf build build-sanitize build-bench build-fuzz out
