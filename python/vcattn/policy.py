"""Which recipe a call runs with, by layer, step and length: or none, where the host's own attention is to stay."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from .errors import InvalidArgumentError
from .recipe import AUTO, as_recipe

NATIVE = "native"  # the host's own attention, in the dtype of its tensors (BF16)

# Calls of at most this many queries or keys go to the host: preparing the operands costs more than 8 bits gain.
DEFAULT_MIN_SEQLEN = 4096


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

    recipe: str = AUTO
    layers: dict[str, str] = field(default_factory=dict)
    native_first: int = 0
    native_last: int = 0
    min_seqlen: int = DEFAULT_MIN_SEQLEN

    def __post_init__(self) -> None:
        for recipe in (self.recipe, *self.layers.values()):
            if recipe != NATIVE:
                as_recipe(recipe)
        for name in ("native_first", "native_last", "min_seqlen"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"policy: {name} is not negative; found {getattr(self, name)}")

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


def as_policy(policy: Policy | str | Path | None) -> Policy:
    """A policy itself, one read from a .json file, one that runs a recipe everywhere, or the default."""
    if policy is None:
        return Policy()
    if isinstance(policy, Policy):
        return policy
    return Policy.load(policy) if str(policy).endswith(".json") else Policy(recipe=str(policy))
