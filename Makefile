# The commands of README.md and CONTRIBUTING.md. Everything real is in CMake; this only spells the invocations.
JOBS ?= $(shell nproc)
PRESET ?= release

.PHONY: demo test test-sanitize test-python test-torch test-wheel bench fuzz build deps deps-bench deps-fuzz deps-python \
  format clean

demo: build
	@mkdir -p out
	build/cli/vcattn compare data/qkv_layer6_4160.safetensors --report out/layer6.html --json out/layer6.json
	build/cli/vcattn compare data/qkv_layer2_16448.safetensors --report out/layer2.html --json out/layer2.json
	@echo "Reports: out/layer2.html and out/layer6.html (the same figures as JSON beside them)"

test: build
	ctest --test-dir build --output-on-failure -j $(JOBS)
	$(MAKE) --no-print-directory test-python

build: deps
	cmake --preset release
	cmake --build build -j $(JOBS)

test-sanitize: deps
	cmake --preset sanitize
	cmake --build build-sanitize -j $(JOBS)
	ctest --test-dir build-sanitize --output-on-failure -j $(JOBS)

# The Python layer over the library of build/, in a virtual environment of its own: without torch (seconds), and with
# torch and diffusers from PyPI. What needs a GPU, or a host that is not installed, skips and says so.
PYTEST = VCATTN_LIBRARY=build/src/libvcattn.so python -m pytest -q -rs
build/python/%: deps-python
	@test -x $@/bin/pip || python3 -m venv $@

test-python: build build/python/plain
	build/python/plain/bin/pip install -q numpy ml_dtypes pytest
	. build/python/plain/bin/activate && $(PYTEST)

test-torch: build build/python/torch
	build/python/torch/bin/pip install -q numpy pytest torch diffusers safetensors matplotlib scikit-image av
	. build/python/torch/bin/activate && $(PYTEST) python/tests evaluation/tests

# Builds and installs the wheel as a user would, and runs the tests against what was installed.
test-wheel: deps deps-python build/python/wheel
	build/python/wheel/bin/pip install -q . pytest
	. build/python/wheel/bin/activate && python -m pytest -q -o pythonpath=python/tests

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
deps-python:
	@scripts/install_deps.sh python

format:
	git ls-files '*.h' '*.hpp' '*.cpp' '*.c' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf build build-sanitize build-bench build-fuzz out
