"""A recipe's fields as the emulation reads them, and the constants of docs/algorithm.md that it needs."""

from __future__ import annotations

from dataclasses import dataclass, fields

import vcattn

TILE_KEYS = 128  # keys in a tile of K and V
SCALE_ROWS = 128  # queries under one block scale, or under one mean
NVFP4_GROUP = 16  # elements under one NVFP4 scale
LOG2_E = 1.4426950408889634
CODES_PER_OCTAVE = 8.0  # E4M3 has 3 mantissa bits
SMALLEST_ABS_MAX = 2.0**-100  # smaller blocks are stored as zeros
MEAN_FLOOR = 2.0**-24  # of the largest mean: the least residual scale
F16_QUERY_MAX = 16.0  # pow2_f16: largest magnitude of a stored query, and of a key up to 128 channels

EXPCAST_PEAK = 120.0  # code of the reference
EXPCAST_INTERCEPT = 119.65  # against an exact maximum: 120 + beta
MAX_CODE = 126.0
TWO_LINE_PEAK, TWO_LINE_INTERCEPT = 126.0, 125.65
TWO_LINE_PIVOT, TWO_LINE_SLOPE = 4.0, 0.146
PHASE_CODES, PHASE_FACTOR = 4.0, 2.0**-0.5


class NotEmulatedError(ValueError):
    """The recipe asks for something that the emulation lacks."""


@dataclass(frozen=True)
class Numerics:
    """The fields of vcattn.Recipe.fields by their names there."""

    qk_format: str
    q_scale_span: str
    k_scale_span: str
    qk_scale_kind: str
    qk_hadamard: bool
    k_centred: bool
    q_centred: bool
    qk_accumulate: str
    p_format: str
    p_phases: int
    row_max: str
    tile_keys: int
    row_sum: str
    v_format: str
    v_scale_span: str
    v_hadamard: bool
    v_order: str
    mean_rows: int
    mean_centred: bool
    mean_format: str
    pv_accumulate: str
    clusters: int
    iterations: int
    warm_iterations: int
    seeding: str
    p_log2_peak: float

    @classmethod
    def of(cls, recipe: str | vcattn.Recipe) -> Numerics:
        """Raises NotEmulatedError, naming the field; vcattn's errors for recipes that do not exist."""
        recipe = vcattn.Recipe(recipe) if isinstance(recipe, str) else recipe
        words = recipe.fields
        convert = {"bool": lambda word: word == "1", "int": int, "float": float, "str": str}
        numerics = cls(**{field.name: convert[field.type](words[field.name]) for field in fields(cls)})
        numerics._check()
        return numerics

    @property
    def two_phases(self) -> bool:
        """Whether odd keys write their byte half an octave higher."""
        return self.p_format == "expcast" and self.p_phases == 2

    @property
    def step_keys(self) -> int:
        """Keys under one step of the softmax."""
        return self.tile_keys if self.row_max == "tile_octave" else TILE_KEYS

    @property
    def p_exact_in_bf16(self) -> bool:
        """Whether weighted probabilities are: E4M3 values times powers of two."""
        return self.p_format in ("expcast", "expcast_two_lines", "e4m3") and self.row_max == "tile_octave"

    def _check(self) -> None:
        refused = {
            "qk_accumulate": self.qk_accumulate not in ("fp32", "hopper_f16"),
            "pv_accumulate": self.pv_accumulate != "fp32",
            "row_max": self.row_max == "running_octave" and self.p_format.startswith("expcast"),
            "seeding": self.seeding != "spaced",
        }
        for name, is_refused in refused.items():
            if is_refused:
                raise NotEmulatedError(f"not emulated: {name}={getattr(self, name)}")
