"""The runs, as data: what renders the clips, and which comparisons the tables show."""

from __future__ import annotations

from dataclasses import dataclass

# What BF16 runs as: torch's attention by one kernel, and by another for the floor.
BF16, FLOOR = "bf16", "bf16_other_kernel"


@dataclass(frozen=True)
class Run:
    """A recipe and its schedule. Runs of several groups with the same name are rendered once."""

    name: str
    recipe: str  # spec of vcattn.Recipe; BF16 and FLOOR name torch's kernels
    schedule: str = "first_quarter"
    reuse: int = 0  # 0: the library's default

    @property
    def is_torch(self) -> bool:
        return self.recipe in (BF16, FLOOR)


def _run(recipe: str, schedule: str = "first_quarter", reuse: int = 0) -> Run:
    name = recipe if schedule == "first_quarter" else f"{recipe} {schedule}"
    return Run(f"{name} reuse={reuse}" if reuse else name, recipe, schedule, reuse)


REFERENCE = Run(BF16, BF16)

_ROW = "row_max=running,tile_keys=128,p_phases=1"  # one exact maximum per row
_TWO_LINES = f"p_format=expcast_two_lines,{_ROW}"
_KINDS = ("first_quarter", "uniform_quarter", "every_step", "never")
_ORDERS = ("sequence", "cube", "kmeans", "balanced", "chain")

GROUPS: dict[str, tuple[Run, ...]] = {
    "recipes": (
        Run(FLOOR, FLOOR),
        *(_run(recipe, "every_step") for recipe in ("exact", "accurate", "fast")),
        # As published, and this project's recipes by that schedule.
        *(
            _run(recipe)
            for recipe in (
                "exact",
                "accurate",
                "fast",
                "vsmooth8",
                "vsmooth8_expcast",
                "sage2",
                "fp8_hadamard",
                "fp8_naive",
                "vsmooth4",
                "sage3",
                "attn_qat",
            )
        ),
    ),
    # What is left when one part is not quantised: which of the three limits a recipe.
    "parts": (
        _run("exact"),
        _run("exact,qk_format=bf16"),
        _run("exact,p_format=bf16,row_max=running"),
        _run("exact,v_format=bf16"),
    ),
    "grouping": tuple(_run(recipe, kind) for recipe in ("accurate", "vsmooth8") for kind in _KINDS),
    # Every step smooths, so that the order matters in all of them.
    "v_order": (
        *(_run(f"accurate,v_order={order}", "every_step") for order in _ORDERS),
        _run("accurate,v_order=sequence,mean_rows=0"),
        _run("accurate,v_order=sequence,mean_rows=0,v_hadamard=1"),
    ),
    "mean_rows": tuple(_run(f"accurate,mean_rows={rows}", "every_step") for rows in (128, 64, 32)),
    "probabilities": (
        _run(f"exact,{_ROW}"),
        _run("exact"),
        _run(f"accurate,{_ROW}"),
        _run(f"accurate,{_TWO_LINES}"),
        _run("accurate,p_phases=1,tile_keys=128"),
        _run("accurate,p_phases=1"),
        _run("accurate,tile_keys=128"),
        _run("accurate"),
    ),
    "qk": (_run("accurate"), _run("accurate,qk_format=e4m3"), _run("fast")),
    "reuse": tuple(_run("accurate", "every_step", reuse) for reuse in (1, 2, 4, 8)),
}

# (better, worse, dB): by how much the first should lie closer to BF16 than the second.
# First as shipped, then all by the published schedule.
CLAIMS = (
    ("accurate every_step", "vsmooth8", 1.0),
    ("accurate every_step", "vsmooth8_expcast", 4.0),
    ("exact every_step", "vsmooth8", 2.0),
    ("fast every_step", "fp8_naive", 0.0),
    ("accurate", "vsmooth8", 1.0),
    ("accurate", "vsmooth8_expcast", 4.0),
    ("exact", "vsmooth8", 2.0),
    ("fast", "fp8_naive", 0.0),
)

# Rendered before the others, should time run out: what CLAIMS compares, and the floor.
FIRST = frozenset({FLOOR, *(name for better, worse, _ in CLAIMS for name in (better, worse))})


def runs_of(groups: list[str]) -> list[Run]:
    """The runs of the groups, each once."""
    return list(dict.fromkeys(run for group in groups for run in GROUPS[group]))
