"""vcattn.sensitivity: what each recipe costs in accuracy on a model's captured layers, and the policy that follows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import captures as captured
from ._check import whole
from .attention import attention
from .errors import InvalidArgumentError
from .policy import DEFAULT_MIN_SEQLEN, NATIVE, Policy

REFERENCE = "fp32"  # nothing quantised
# Fastest first: a layer gets the first that is accurate enough for it.
DEFAULT_RECIPES = ("fast", "accurate", "exact")
# ||out - reference|| / ||reference|| of a call. A starting point: whether it is right for a model is for end-to-end
# comparisons to say.
DEFAULT_TOLERANCE = 0.02
_ROWS = 1024  # queries of each call that are compared, in blocks of 128 spread over the sequence
_BLOCK = 128


@dataclass(frozen=True)
class Measurement:
    """Relative L2 error of one call by recipe."""

    layer: str
    step: int | None
    num_steps: int | None
    errors: dict[str, float]


@dataclass(frozen=True)
class Sensitivity:
    """Measurements in the order of the captures, and the recipes in order of preference."""

    measurements: tuple[Measurement, ...]
    recipes: tuple[str, ...]

    def layers(self) -> dict[str, dict[str, float]]:
        """For each layer the largest error of each recipe over its calls."""
        table: dict[str, dict[str, float]] = {}
        for m in self.measurements:
            row = table.setdefault(m.layer, dict.fromkeys(self.recipes, 0.0))
            for recipe, error in m.errors.items():
                row[recipe] = float(np.maximum(row[recipe], error))  # which keeps NaN
        return table

    def policy(self, tolerance: float = DEFAULT_TOLERANCE, *, min_seqlen: int = DEFAULT_MIN_SEQLEN) -> Policy:
        """The policy with the fastest recipe for each layer whose error stays within `tolerance`.

        Steps at either end at which most captured layers exceed it with every recipe become native_first and
        native_last; the layers are judged by the rest. A layer that no recipe serves stays native. The recipe that
        most layers get is the default, so that layers that were not captured have it too.
        """
        if not 0 <= tolerance < np.inf:
            raise InvalidArgumentError(f"tolerance is finite and not negative; found {tolerance}")
        first, last = self._native_steps(tolerance)
        layers = dict.fromkeys(m.layer for m in self.measurements if not _is_native(m, first, last))
        chosen = {layer: self._recipe_for(layer, tolerance, first, last) for layer in layers}
        counts = [list(chosen.values()).count(recipe) for recipe in self.recipes]
        default = self.recipes[int(np.argmax(counts))] if any(counts) else NATIVE
        rules = {layer: recipe for layer, recipe in chosen.items() if recipe != default}
        return Policy(default, rules, native_first=first, native_last=last, min_seqlen=min_seqlen)

    def _recipe_for(self, layer: str, tolerance: float, first: int, last: int) -> str:
        counted = [m for m in self.measurements if m.layer == layer and not _is_native(m, first, last)]
        for recipe in self.recipes:
            if all(m.errors[recipe] <= tolerance for m in counted):
                return recipe
        return NATIVE

    def _native_steps(self, tolerance: float) -> tuple[int, int]:
        known = [m for m in self.measurements if m.step is not None and m.num_steps is not None]
        failing = {}
        for step in sorted({m.step for m in known}):
            at = [m for m in known if m.step == step]
            failing[step] = 2 * sum(not _fits(m, tolerance) for m in at) > len(at)
        if not failing or all(failing.values()):
            return 0, 0  # no step differs from the others
        first = last = 0
        for step, fails in failing.items():
            if not fails:
                break
            first = step + 1
        num_steps = max(m.num_steps for m in known)
        for step, fails in reversed(failing.items()):
            if not fails:
                break
            last = num_steps - step
        return first, last

    def save(self, path: str | Path) -> None:
        """Writes the measurements as JSON, for `python -m vcattn plot`."""
        calls = [asdict(m) for m in self.measurements]
        Path(path).write_text(
            json.dumps({"kind": "sensitivity", "recipes": self.recipes, "calls": calls}, indent=1) + "\n"
        )

    def __str__(self) -> str:
        width = max([len("layer"), *(len(m.layer) for m in self.measurements)])
        lines = [f"{'layer':{width}}" + "".join(f"{recipe:>20}" for recipe in self.recipes)]
        for layer, row in self.layers().items():
            lines.append(f"{layer:{width}}" + "".join(f"{row[recipe]:20.5f}" for recipe in self.recipes))
        return "\n".join(lines)


def _is_native(m: Measurement, first: int, last: int) -> bool:
    return m.step is not None and (m.step < first or (m.num_steps is not None and m.step >= m.num_steps - last))


def _fits(m: Measurement, tolerance: float) -> bool:
    """Whether some recipe stays within the tolerance. An error of NaN does not."""
    return any(error <= tolerance for error in m.errors.values())


def _relative(difference: float, norm: float) -> float:
    """Of a reference that is 0 everywhere: no error where the output is 0 too, else an infinite one."""
    if norm == 0:
        return 0.0 if difference == 0 else float("inf")
    return difference / norm


def sensitivity(
    captures: Iterable[str | Path | captured.Capture],
    *,
    recipes: Sequence[str] = DEFAULT_RECIPES,
    rows: int = _ROWS,
    backend: str = "auto",
) -> Sensitivity:
    """Runs captured calls through recipes and measures each against the same call with nothing quantised.

    captures: files of `python -m vcattn capture`, folders of them, or Capture objects.
    recipes: names or specs, fastest first.
    rows: queries of each call that are compared, in blocks of 128 spread over the sequence; all keys are used.
    Raises what vcattn.attention raises, UnsupportedError where safetensors is not installed, and InvalidArgumentError
    where there are no captures.
    """
    rows = whole("rows", rows, least=1)
    measurements = []
    for capture in captured.load_all(captures):
        q = _spread_blocks(capture.q, rows)

        def attend(recipe: str) -> np.ndarray:
            out = attention(
                q, capture.k, capture.v, recipe=recipe, scale=capture.scale, enable_gqa=True, backend=backend
            )
            return np.asarray(out if isinstance(out, np.ndarray) else out.float().cpu(), np.float64)

        reference = attend(REFERENCE)
        norm = float(np.linalg.norm(reference))
        errors = {recipe: _relative(float(np.linalg.norm(attend(recipe) - reference)), norm) for recipe in recipes}
        measurements.append(Measurement(capture.layer, capture.step, capture.num_steps, errors))
    if not measurements:
        raise InvalidArgumentError("no captures: there is no .safetensors file where they were looked for")
    return Sensitivity(tuple(measurements), tuple(recipes))


def _spread_blocks(q: Any, rows: int) -> Any:
    """[batch, at most `rows`, num_heads, head_dim]: whole blocks of 128 queries, spread evenly."""
    seqlen = q.shape[1]
    if seqlen <= rows:
        return q
    blocks = max(1, rows // _BLOCK)
    starts = [i * (seqlen - _BLOCK) // max(1, blocks - 1) for i in range(blocks)]
    index = np.concatenate([np.arange(start, start + _BLOCK) for start in starts])
    return q[:, index] if isinstance(q, np.ndarray) else q[:, index.tolist()]
