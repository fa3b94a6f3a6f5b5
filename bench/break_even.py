#!/usr/bin/env python3
"""From which length on calls of vcattn are faster than torch's BF16 attention (cuDNN's).

Times whole calls beside SDPA over lengths, heads and head dimensions, as compare_sdpa.py does (its header says how),
and prints for each recipe how many times as fast they are, and where that passes 1. Its last lines are the table of
src/arch/sm90a/break_even.h.

Three calls of each recipe: the order of the keys given; a warm grouping before it; and the call that groups by itself,
from a cold start. The device idles before each round, so that calls of a few ten microseconds wait for no host.

usage: bench/break_even.py --library build/src/libvcattn.so [--json break_even.json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from compare_sdpa import BASELINE, Contender, Shape, Tensors, Vcattn, interleave, sdpa_contenders, usable

from vcattn import _library  # from the folder that compare_sdpa names

LENGTHS = [1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768]
HEADS = [12, 24, 40]
HEAD_DIMS = [128, 64]
ORDERED, WARM, GROUPING = "order given", "warm grouping", "groups in the call"
# What the recipes' rows of the table are called.
KERNELS = {
    "accurate": "Scores::kInt8, Probabilities::kExpCast",
    "exact": "Scores::kInt8, Probabilities::kExp2",
    "fast": "Scores::kE4m3, Probabilities::kExpCast",
}
ROUNDED_TO = 256  # upwards, in the table
IDLE_CYCLES = 2_000_000  # about a millisecond: more than the host needs to queue a round


def contenders_of(library: Any, recipe: str, tensors: Tensors) -> list[Contender]:
    ordered, grouping = Vcattn(library, recipe, tensors), Vcattn(library, recipe, tensors, groups=True)
    return [
        Contender(f"{recipe}, {ORDERED}", ordered.attention),
        Contender(f"{recipe}, {WARM}", ordered.group_and_attention),
        Contender(f"{recipe}, {GROUPING}", grouping.attention),
    ]


def speedups(library: Any, shape: Shape, recipes: list[str], rounds: int) -> dict[str, float]:
    """How many times as fast as BF16 each call is; medians. Raises RuntimeError where one does not run."""
    tensors = Tensors.random(shape)
    contenders = [c for c in sdpa_contenders(tensors) if c.name == BASELINE]
    for recipe in recipes:
        contenders += contenders_of(library, recipe, tensors)
    contenders, refused, _ = usable(contenders, tensors)
    if refused:
        raise RuntimeError(f"{shape}: {refused}")
    samples, _ = interleave(contenders, rounds, IDLE_CYCLES)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    baseline = medians.pop(BASELINE)
    return {name: baseline / time for name, time in medians.items()}


def break_even(lengths: list[int], ratios: list[float]) -> float:
    """Length from which on all ratios are at least 1, between two lengths by the logarithms of both; 0 where they are
    throughout, infinite where the last one is not."""
    slower = [i for i, ratio in enumerate(ratios) if ratio < 1.0]
    if not slower:
        return 0.0
    last = slower[-1]
    if last + 1 == len(lengths):
        return math.inf
    part = -math.log(ratios[last]) / (math.log(ratios[last + 1]) - math.log(ratios[last]))
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** part


def length_text(length: float, lengths: list[int]) -> str:
    if length == 0.0:
        return f"<= {lengths[0]}"
    return f"> {lengths[-1]}" if math.isinf(length) else f"{length:.0f}"


def rounded(length: float, lengths: list[int]) -> int | str:
    """For the table: below the shortest that was tried as that one."""
    if math.isinf(length):
        return "kNever"
    return math.ceil(max(length, lengths[0]) / ROUNDED_TO) * ROUNDED_TO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, default=None, help="libvcattn.so [VCATTN_LIBRARY, or the package's]")
    parser.add_argument("--recipe", action="append", choices=list(KERNELS), help="repeatable [all]")
    parser.add_argument("--length", type=int, action="append", help=f"repeatable {LENGTHS}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all ratios to a path")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("break_even: torch finds no CUDA device")
    recipes, lengths = options.recipe or list(KERNELS), sorted(options.length or LENGTHS)
    library = _library.load(options.library or _library.path())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cudnn {torch.backends.cudnn.version()}")

    cases, rows = [], []
    for head_dim in HEAD_DIMS:
        found: dict[str, list[float]] = {}  # break-even lengths by call, one for each number of heads
        for heads in HEADS:
            by_length = []
            for length in lengths:
                shape = Shape(1, length, length, heads, heads, head_dim)
                with torch.inference_mode():
                    by_length.append(speedups(library, shape, recipes, options.rounds))
                torch.cuda.empty_cache()
            cases.append({"head_dim": head_dim, "heads": heads, "lengths": lengths, "speedups": by_length})
            print(f"\n{heads} heads x {head_dim}, times BF16" + "".join(f"{n:>8}" for n in lengths) + "   break-even")
            for call in by_length[0]:
                ratios = [at[call] for at in by_length]
                length = break_even(lengths, ratios)
                found.setdefault(call, []).append(length)
                cells = "".join(f"{ratio:8.2f}" for ratio in ratios)
                print(f"{call:30}{cells}   {length_text(length, lengths)}", flush=True)
        for recipe in recipes:
            ordered, grouping = (rounded(max(found[f"{recipe}, {kind}"]), lengths) for kind in (ORDERED, GROUPING))
            rows.append(f"    {{{KERNELS[recipe]}, {head_dim}, {ordered}, {grouping}}},")
    print("\nkBreakEvens, the longest of " + ", ".join(map(str, HEADS)) + " heads:\n" + "\n".join(rows))
    if options.json:
        options.json.write_text(json.dumps({"cases": cases, "table": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
