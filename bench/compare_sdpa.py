#!/usr/bin/env python3
"""Whole calls of vcattn beside torch's scaled_dot_product_attention (cuDNN and FlashAttention, BF16), in one process;
with --flash-attention-3 also beside FlashAttention-3 in BF16, where its Python package is installed.

Every round runs each contender once, in an order of its own, on one stream; CUDA events take the times, and while a
round runs the next is queued, so that the device never waits for Python. Random normal tensors in [batch, seqlen,
num_heads, head_dim] storage for all (torch sees them transposed). Two whole calls of each recipe: with the order of the
keys given, and with a warm grouping before it, which is what a host pays in steps that regroup. Calls write into memory
that was allocated before; SDPA allocates its output from torch's cache, as in use.

The kernels alone cannot be reached from Python: with --tool the command-line tool times them right after, on tensors of
its own.

usage: bench/compare_sdpa.py --library build/src/libvcattn.so [--tool build/cli/vcattn] [--shape 1x4608x4608x24x24x128]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import addressof
from pathlib import Path
from typing import Any, NamedTuple

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
except ImportError as error:
    sys.exit(f"compare_sdpa.py needs torch with CUDA: {error}")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))
from vcattn import _abi, _library

BASELINE = "sdpa cudnn"
FLASH_ATTENTION_3 = "flash attention 3"
# Its interface, by the name that its own build gives it, and by that of the forward-only wheel fa3-fwd.
FLASH_ATTENTION_3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
SDPA = {BASELINE: SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}


class Shape(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_kv: int
    num_heads: int
    num_heads_kv: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            shape = cls(*map(int, text.split("x")))
        except (TypeError, ValueError):
            raise argparse.ArgumentTypeError(
                f"expected batch x seqlen_q x seqlen_kv x num_heads x num_heads_kv x head_dim, found {text!r}"
            ) from None
        if min(shape) < 1:
            raise argparse.ArgumentTypeError(f"expected extents of at least 1, found {text!r}")
        return shape

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def flops(self) -> float:
        return 4.0 * self.batch * self.seqlen_q * self.seqlen_kv * self.num_heads * self.head_dim


class Tensors(NamedTuple):
    q: torch.Tensor  # [batch, seqlen_q, num_heads, head_dim]
    k: torch.Tensor  # [batch, seqlen_kv, num_heads_kv, head_dim]
    v: torch.Tensor
    out: torch.Tensor  # of vcattn

    @classmethod
    def random(cls, s: Shape) -> Tensors:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(seqlen: int, heads: int) -> torch.Tensor:
            extents = (s.batch, seqlen, heads, s.head_dim)
            return torch.randn(extents, generator=generator, device="cuda", dtype=torch.bfloat16)

        q = normal(s.seqlen_q, s.num_heads)
        k, v = (normal(s.seqlen_kv, s.num_heads_kv) for _ in range(2))
        return cls(q, k, v, torch.empty_like(q))


class Contender(NamedTuple):
    name: str
    # Queues one call; vcattn's write Tensors.out, others return theirs: [batch, seqlen_q, num_heads, head_dim].
    run: Callable[[], Any]


def abi_tensor(x: torch.Tensor) -> _abi.Tensor:
    return _abi.Tensor(x.data_ptr(), _abi.BF16, 0, tuple(x.shape), tuple(x.stride()))


class Vcattn:
    """Calls of one recipe on one set of tensors, with memory of its own. `groups`: each call makes its own order."""

    def __init__(self, library: ctypes.CDLL, recipe: str, tensors: Tensors, *, groups: bool = False):
        self.library, self.tensors = library, tensors
        self.message = _abi.Message()
        self.params = _abi.AttentionParams()
        library.vcattn_attention_params_init(addressof(self.params))
        self._check(
            library.vcattn_recipe_by_name(recipe.encode(), addressof(self.params.recipe), addressof(self.message))
        )
        for name in Tensors._fields:
            setattr(self.params, name, abi_tensor(getattr(tensors, name)))
        self.params.backend, self.params.memory = _abi.BACKEND_SM90A, _abi.MEMORY_CUDA
        self.params.stream = torch.cuda.current_stream().cuda_stream
        batch, seqlen, heads, dim = tensors.v.shape
        self.permutation = torch.empty((batch, heads, seqlen), dtype=torch.int32, device="cuda")
        clusters = self.params.recipe.grouping.clusters
        self.centroids = torch.empty((batch, heads, clusters, dim), dtype=torch.float32, device="cuda")
        grouping = self._bytes(library.vcattn_group_workspace_size)
        self.params.permutation = None if groups else self.permutation.data_ptr()
        self.workspace_bytes = self._bytes(library.vcattn_attention_workspace_size)
        self.workspace = torch.empty(max(grouping, self.workspace_bytes), dtype=torch.uint8, device="cuda")
        if not groups:
            self.group(warm=False)

    def _check(self, code: int) -> None:
        _library.check(code, self.message)

    def _bytes(self, size_of: Any) -> int:
        size = ctypes.c_size_t()
        self._check(size_of(addressof(self.params), addressof(size), addressof(self.message)))
        return size.value

    def group(self, *, warm: bool) -> None:
        self._check(
            self.library.vcattn_group(
                addressof(self.params),
                int(warm),
                self.centroids.data_ptr(),
                self.permutation.data_ptr(),
                self.workspace.data_ptr(),
                self.workspace.numel(),
                addressof(self.message),
            )
        )

    def attention(self) -> None:
        self._check(
            self.library.vcattn_attention(
                addressof(self.params), self.workspace.data_ptr(), self.workspace.numel(), addressof(self.message)
            )
        )

    def group_and_attention(self) -> None:
        self.group(warm=True)
        self.attention()


def sdpa_contenders(tensors: Tensors) -> list[Contender]:
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])

    def call(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            return out.transpose(1, 2)

    return [Contender(name, lambda backend=backend: call(backend)) for name, backend in SDPA.items()]


def flash_attention_3() -> tuple[Callable[..., Any] | None, str]:
    """Its flash_attn_func and the module it is from; or None, and why."""
    reasons = []
    for name in FLASH_ATTENTION_3_MODULES:
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # absent, or built for another torch
            reasons.append(f"{name}: {error}")
            continue
        if (function := getattr(module, "flash_attn_func", None)) is not None:
            return function, name
        reasons.append(f"{name}: has no flash_attn_func")
    return None, "; ".join(reasons)


def flash_attention_3_contender(function: Callable[..., Any], tensors: Tensors) -> Contender:
    def call() -> torch.Tensor:
        result = function(tensors.q, tensors.k, tensors.v)
        return result[0] if isinstance(result, tuple) else result  # some versions return the lse, too

    return Contender(FLASH_ATTENTION_3, call)


def vcattn_contenders(library: ctypes.CDLL, recipe: str, tensors: Tensors) -> list[Contender]:
    calls = Vcattn(library, recipe, tensors)
    return [
        Contender(f"{recipe}, order given", calls.attention),
        Contender(f"{recipe}, warm grouping", calls.group_and_attention),
    ]


def read_clocks() -> dict[str, float] | None:
    """SM clock and power, through NVML where torch finds its Python package."""
    try:
        return {"sm_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1e3}
    except (ImportError, RuntimeError):
        return None


def interleave(
    contenders: list[Contender], rounds: int, idle_cycles: int = 0
) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Milliseconds of each contender, one a round, and readings of the clocks while rounds ran. Each round has an order
    of its own: a card at its power limit pays for what ran just before.

    idle_cycles: so long the device idles before each round, for calls so short that the host would fall behind.
    """

    shuffled = random.Random(0)

    def queue_round() -> tuple[list[Contender], list[torch.cuda.Event]]:
        if idle_cycles:
            torch.cuda._sleep(idle_cycles)
        order = shuffled.sample(contenders, len(contenders))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
        events[0].record()
        for contender, event in zip(order, events[1:]):
            contender.run()
            event.record()
        return order, events

    queue_round()  # plans and caches; not kept
    queued = [queue_round()]
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    clocks = []
    for left in reversed(range(rounds)):
        if left > 0:
            queued.append(queue_round())
        order, events = queued.pop(0)
        events[0].synchronize()
        if (reading := read_clocks()) is not None:
            clocks.append(reading)
        events[-1].synchronize()
        for contender, begin, end in zip(order, events, events[1:]):
            samples[contender.name].append(begin.elapsed_time(end))
    return samples, clocks


def usable(contenders: list[Contender], tensors: Tensors) -> tuple[list[Contender], dict[str, str], dict[str, float]]:
    """Those that run; why the others do not; and relative L2 distances of outputs to the baseline's."""
    kept, refused, distances = [], {}, {}
    baseline = None
    for contender in contenders:
        tensors.out.fill_(float("nan"))
        try:
            result = contender.run()
            torch.cuda.synchronize()
        except RuntimeError as error:
            refused[contender.name] = str(error).splitlines()[0]
            continue
        out = tensors.out if result is None else result
        if contender.name == BASELINE:
            baseline = out
        elif baseline is not None:
            norm = torch.linalg.vector_norm
            distance = norm(out - baseline, dtype=torch.float32) / norm(baseline, dtype=torch.float32)
            distances[contender.name] = distance.item()
        kept.append(contender)
    return kept, refused, distances


def tool_kernels(tool: str, shape: Shape, recipes: list[str], rounds: int) -> dict[str, Any]:
    """What `vcattn bench attention` writes for the shape."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernels.json")
        command = [tool, "bench", "attention", "--shape", str(shape), "--rounds", str(rounds), "--json", path]
        for recipe in recipes:
            command += ["--recipe", recipe]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(path).read_text())


def compare(
    library: ctypes.CDLL, shape: Shape, recipes: list[str], rounds: int, flash3: Callable[..., Any] | None
) -> dict[str, Any]:
    tensors = Tensors.random(shape)
    contenders = sdpa_contenders(tensors)
    if flash3 is not None:
        contenders.append(flash_attention_3_contender(flash3, tensors))
    for recipe in recipes:
        contenders += vcattn_contenders(library, recipe, tensors)
    contenders, refused, distances = usable(contenders, tensors)
    before = read_clocks()
    samples, clocks = interleave(contenders, rounds)
    return {
        "shape": shape._asdict(),
        "flops": shape.flops,
        "samples_ms": samples,
        "median_ms": {name: statistics.median(times) for name, times in samples.items()},
        "refused": refused,
        "relative_l2_to_cudnn": distances,
        "clocks": {"before": before, "running": clocks, "after": read_clocks()},
    }


def table(result: dict[str, Any], kernels: dict[str, Any] | None) -> str:
    rows = dict(result["samples_ms"])
    if kernels is not None:
        for recipe in kernels["cases"][0]["recipes"]:
            rows[f"{recipe['name']}, kernel (tool)"] = recipe["parts"][0]["samples_ms"]
    baselines = {"x cudnn": result["median_ms"].get(BASELINE), "x fa3": result["median_ms"].get(FLASH_ATTENTION_3)}
    baselines = {header: time for header, time in baselines.items() if time}
    ratios = "".join(f"{header:>9}" for header in baselines)
    lines = [f"{'':28}{'median ms':>11}{'min ms':>11}{'max ms':>11}{'TFLOP/s':>9}{ratios}{'rel L2':>9}"]
    for name, times in rows.items():
        middle = statistics.median(times)
        ratios = "".join(f"{time / middle:9.2f}" for time in baselines.values())
        distance = result["relative_l2_to_cudnn"].get(name)
        line = f"{name:28}{middle:11.3f}{min(times):11.3f}{max(times):11.3f}{result['flops'] / middle / 1e9:9.0f}"
        lines.append(f"{line}{ratios}" + (f"{distance:9.4f}" if distance is not None else ""))
    lines += [f"{name}: refused: {reason}" for name, reason in result["refused"].items()]
    readings = result["clocks"]["running"]
    if readings:
        mhz, watts = [r["sm_mhz"] for r in readings], [r["watts"] for r in readings]
        lines.append(f"SM clock {min(mhz)}..{max(mhz)} MHz, power {min(watts):.0f}..{max(watts):.0f} W while it ran")
    else:
        lines.append("clocks: not read (torch needs the package nvidia-ml-py)")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=None, help="libvcattn.so [VCATTN_LIBRARY, or the package's]")
    parser.add_argument("--tool", help="the program vcattn, to time the kernels alone too")
    parser.add_argument("--shape", type=Shape.parse, action="append", help="repeatable [1x75600x75600x40x40x128]")
    parser.add_argument("--recipe", action="append", help="repeatable [accurate, fast]")
    parser.add_argument("--flash-attention-3", action="store_true", help="also FlashAttention-3, if it is installed")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="write all samples to a path")
    options = parser.parse_args()
    shapes = options.shape or [Shape(1, 75600, 75600, 40, 40, 128)]
    recipes = options.recipe or ["accurate", "fast"]
    if options.rounds < 1:
        parser.error("--rounds: expected at least 1")
    if not torch.cuda.is_available():
        sys.exit("compare_sdpa: torch finds no CUDA device")
    library = _library.load(options.library or _library.path())
    flash3, flash3_source = flash_attention_3() if options.flash_attention_3 else (None, "")

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "vcattn": library.vcattn_version().decode(),
        "rounds": options.rounds,
        "flash_attention_3": flash3_source,
        "cases": [],
    }
    if options.flash_attention_3:
        print(f"{FLASH_ATTENTION_3}: " + (f"not timed: {flash3_source}" if flash3 is None else flash3_source))
    print(", ".join(f"{key} {report[key]}" for key in ("device", "torch", "cuda", "cudnn", "vcattn")))
    for shape in shapes:
        with torch.inference_mode():
            result = compare(library, shape, recipes, options.rounds, flash3)
        torch.cuda.empty_cache()  # the tool takes memory of its own
        kernels = tool_kernels(options.tool, shape, recipes, options.rounds) if options.tool else None
        report["cases"].append({**result, "tool": kernels})
        print(f"\n{shape}, {options.rounds} rounds\n{table(result, kernels)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
