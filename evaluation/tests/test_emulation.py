"""Every emulated recipe against the CPU back end, which defines it."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from evaluation.video.emulation import (  # noqa: E402
    EmulatedState,
    NotEmulatedError,
    Numerics,
    attention,
    formats,
)
from evaluation.video.experiments import GROUPS  # noqa: E402

import vcattn  # noqa: E402

# The module, which the package hides behind its function.
emulation = sys.modules["evaluation.video.emulation.attention"]

GRID = (24, 2, 16, 18)  # 24 tokens of text, then cubes, two of them ragged
TOKENS, HEADS, DIM = 24 + 2 * 16 * 18, 2, 128  # 4.7 tiles
RECIPES = sorted(
    {run.recipe for runs in GROUPS.values() for run in runs if not run.is_torch} | set(vcattn.recipe_names())
)
# How far the emulation may lie from the library, in parts of the error that the recipe itself has. What differs is the
# order of FP32 sums, which moves a code at a tie. `fast` has FP16 sums besides: the library cuts products as the tensor
# core does.
PART, PART_F16_SUMS = 0.05, 0.15
LEAST = 2e-6  # relative, where the recipe has hardly an error


def tensors(seed: int = 0, tokens: int = TOKENS) -> list[torch.Tensor]:
    """q, k, v [1, HEADS, tokens, DIM]: BF16 values; k has a bias and v clusters, as a model's have."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k = 2 * normal(1, HEADS, tokens, DIM), normal(1, HEADS, tokens, DIM) + 2 * normal(DIM)
    centres = 2 * normal(10, DIM)
    v = normal(1, HEADS, tokens, DIM) + centres[torch.randint(10, (1, HEADS, tokens), generator=generator)]
    return [x.bfloat16().float() for x in (q, k, v)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def bound(recipe: str, library: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double()).float()
    part = PART_F16_SUMS if Numerics.of(recipe).qk_accumulate == "hopper_f16" else PART
    return max(part * distance(library, exact), LEAST)


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_the_library(recipe):
    q, k, v = tensors()
    library = vcattn.attention(q, k, v, recipe=recipe, layout="BHSD", grid=GRID)
    state = EmulatedState(Numerics.of(recipe), vcattn.Schedule(1, "every_step"), GRID)
    emulated = attention(q, k, v, *state.prepare(v, 0))
    assert distance(emulated, library) <= bound(recipe, library, q, k, v)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_told_apart(recipe):
    """The bound of the test above is narrower than the distance to most other recipes, so that it can fail."""
    q, k, v = tensors()
    library = vcattn.attention(q, k, v, recipe=recipe, layout="BHSD", grid=GRID)
    other = attention(q, k, v, Numerics.of("sage2,p_format=e4m3,v_scale_span=head,qk_hadamard=1"))
    assert distance(other, library) > bound(recipe, library, q, k, v)


@pytest.mark.parametrize("kind", ["first_quarter", "uniform_quarter", "every_step", "never"])
@pytest.mark.parametrize("recipe", ["accurate", "vsmooth8", "accurate,v_order=cube", "sage2"])
def test_state_follows_the_schedule(recipe, kind):
    """Cold and warm grouping, reuse, and steps that do not smooth: values drift from step to step."""
    schedule = vcattn.Schedule(8, kind, reuse=2)
    states, emulated_state = vcattn.State(schedule), EmulatedState(Numerics.of(recipe), schedule, GRID)
    drift = tensors(1)
    for step in range(4):
        q, k, v = (x + 0.3 * step * d for x, d in zip(tensors(), drift))
        library = vcattn.attention(q, k, v, recipe=recipe, layout="BHSD", grid=GRID, state=states, step=step)
        emulated = attention(q, k, v, *emulated_state.prepare(v, step))
        assert distance(emulated, library) <= bound(recipe, library, q, k, v), f"step {step}"


def test_tokens_that_fill_no_tile():
    q, k, v = tensors(tokens=37)
    library = vcattn.attention(q, k, v, recipe="accurate", layout="BHSD")
    state = EmulatedState(Numerics.of("accurate"), vcattn.Schedule(1, "every_step"), (0, 1, 1, 37))
    assert distance(attention(q, k, v, *state.prepare(v, 0)), library) <= bound("accurate", library, q, k, v)


@pytest.mark.parametrize("backend", ["eager", "broken"])
def test_compiled_softmax(backend, monkeypatch, recwarn):
    """Serves where it gives the same; else the plain one does, and a warning says so."""

    def compile(function, **options):
        if backend == "broken":
            return lambda *args: tuple(2 * x for x in function(*args))
        return real_compile(function, backend="eager", **options)

    real_compile = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    emulation._compiled_softmax.cache_clear()
    q, k, v = tensors(tokens=300)
    for recipe in ("accurate", "sage3"):
        numerics = Numerics.of(recipe)
        plain = attention(q, k, v, numerics)
        for _ in range(2):  # the check, then what it let through
            torch.testing.assert_close(attention(q, k, v, numerics, compiled=True), plain)
    emulation._compiled_softmax.cache_clear()
    assert any("without torch.compile" in str(w.message) for w in recwarn) == (backend == "broken")


def test_chunks_of_queries_do_not_matter(monkeypatch):
    q, k, v = tensors(tokens=300)
    whole = attention(q, k, v, Numerics.of("sage3"))
    monkeypatch.setattr(emulation, "_CHUNK_SCORES", {"cpu": 200 * 384})
    assert emulation._chunk_rows(300, 384, torch.device("cpu")) == 256  # 300 rows are 3 blocks of 128, in 2 chunks
    torch.testing.assert_close(attention(q, k, v, Numerics.of("sage3")), whole)


def test_refuses_what_it_lacks():
    with pytest.raises(NotEmulatedError, match="pv_accumulate"):
        Numerics.of("accurate,pv_accumulate=hopper")
    with pytest.raises(vcattn.InvalidArgumentError):
        Numerics.of("no_such_recipe")


def test_formats():
    """Ties go to even codes; the largest values saturate."""
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -5.0, -0.2])
    assert formats.round_e2m1(x).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -4.0, 0.0]
    assert formats.round_e4m3(torch.tensor([17.0, 19.0, 1000.0, -0.5])).tolist() == [16.0, 20.0, 448.0, -0.5]
    codes = torch.tensor([0.0, 1.0, 8.0, 56.0, 120.0, 126.0])
    assert formats.decode_e4m3(codes).tolist() == [0.0, 2**-9, 2**-6, 1.0, 256.0, 448.0]
    assert formats.round_tf32(torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -1.5])).tolist() == [1.0, 1 + 2**-9, -1.5]
    assert formats.round_int8(torch.tensor([0.5, 1.5, -200.0])).tolist() == [0.0, 2.0, -127.0]
