"""Which recipe a call runs with, by layer, step and length: or none, where the host's own attention is to stay."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ._check import whole
from .errors import InvalidArgumentError
from .recipe import AUTO, Recipe, as_recipe, spec_of

NATIVE = "native"  # the host's own attention, in the dtype of its tensors (BF16)

# Calls of at most this many queries or keys go to the host: preparing the operands costs more than 8 bits gain. It is
# what vcattn_break_even_seqlen says of `accurate` at 128 channels, written down because defaults are needed before the
# library is loaded; a test compares the two.
DEFAULT_MIN_SEQLEN = 4608  # with an order given: kept between steps
GROUPING_MIN_SEQLEN = 10496  # of calls that make their order


class Choice(NamedTuple):
    """What a call does: `recipe` is a spec for vcattn.attention, or None for the host's own attention."""

    recipe: str | None
    reason: str


@dataclass(frozen=True)
class Policy:
    """Immutable; the first rule that applies decides: length, step, layer, default.

    recipe: name or spec of every call that no rule below speaks of.
    layers: recipe, or "native", by layer name; patterns as in file names ("blocks.0.*"), the first that matches counts.
        Where a call's layer is not known while there are such rules, it keeps the host's own attention.
    native_first, native_last: so many denoising steps at either end keep the host's own attention. Where a call's step
        is not known while one of them is set, the call keeps it too.
    min_seqlen: so do calls of at most this many queries or keys.
    Raises InvalidArgumentError for unknown recipes and for negative numbers.
    """

    recipe: str | Recipe = AUTO
    layers: dict[str, str | Recipe] = field(default_factory=dict)
    native_first: int = 0
    native_last: int = 0
    min_seqlen: int = DEFAULT_MIN_SEQLEN

    def __post_init__(self) -> None:
        if not isinstance(self.layers, dict) or not all(isinstance(pattern, str) for pattern in self.layers):
            raise InvalidArgumentError(f"policy: layers are recipes by pattern; found {self.layers!r}")
        # Recipes are kept by their specs, as JSON has them.
        object.__setattr__(self, "recipe", _spec(self.recipe))
        object.__setattr__(self, "layers", {pattern: _spec(recipe) for pattern, recipe in self.layers.items()})
        for name in ("native_first", "native_last", "min_seqlen"):
            object.__setattr__(self, name, whole(f"policy: {name}", getattr(self, name), least=0))

    def choose(
        self, *, layer: str | None, step: int | None, num_steps: int | None, seqlen_q: int, seqlen_kv: int
    ) -> Choice:
        """What a call does. layer, step and num_steps are None where the host does not tell them."""
        if seqlen_q <= self.min_seqlen or seqlen_kv <= self.min_seqlen:
            return Choice(None, f"at most {self.min_seqlen} queries or keys (min_seqlen)")
        if self.native_first and (step is None or step < self.native_first):
            return Choice(
                None, f"policy: first {self.native_first} steps" if step is not None else "policy: step unknown"
            )
        if self.native_last:
            if step is None or num_steps is None:
                return Choice(None, "policy: step unknown")
            if step >= num_steps - self.native_last:
                return Choice(None, f"policy: last {self.native_last} steps")
        if self.layers:
            if layer is None:
                return Choice(None, "policy: layer unknown")
            for pattern, recipe in self.layers.items():
                if fnmatchcase(layer, pattern):
                    return Choice(None, f"policy: layer {pattern}") if recipe == NATIVE else Choice(recipe, pattern)
        return Choice(None, "policy") if self.recipe == NATIVE else Choice(self.recipe, "default")

    def save(self, path: str | Path) -> None:
        """Writes the policy as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """Reads what `save` wrote. Raises InvalidArgumentError for anything else."""
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"{path}: not a policy: {error}") from error


def _spec(recipe: str | Recipe) -> str:
    if recipe != NATIVE:
        as_recipe(recipe)  # raises for what is unknown
    return spec_of(recipe)


def as_policy(policy: Policy | str | Path | None, *, min_seqlen: int = DEFAULT_MIN_SEQLEN) -> Policy:
    """A policy itself, one read from a .json file, one that runs a recipe everywhere, or the default; the last two with
    this min_seqlen."""
    if policy is None:
        return Policy(min_seqlen=min_seqlen)
    if isinstance(policy, Policy):
        return policy
    return Policy.load(policy) if str(policy).endswith(".json") else Policy(str(policy), min_seqlen=min_seqlen)
