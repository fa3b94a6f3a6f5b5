"""The same on a CUDA card: emulation, its fast paths, torch's kernels, and which recipes the back end serves."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA card", allow_module_level=True)

from evaluation.video import routing  # noqa: E402
from evaluation.video.emulation import EmulatedState, Numerics, attention  # noqa: E402
from evaluation.video.experiments import BF16, FLOOR, Run  # noqa: E402

import vcattn  # noqa: E402

emulation = sys.modules["evaluation.video.emulation.attention"]
CARD = torch.device("cuda")
GRID = (24, 2, 16, 18)
# Beside the error of the recipes, about .02 and more on these tensors: as in test_emulation.py, with room for the order
# of the card's sums.
APART = 2e-3


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 24 + 2 * 16 * 18, 128, generator=generator)
    return [x.bfloat16().float() for x in (2 * q, k + 1, v)]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.cpu() - b).norm() / b.norm())


def test_products_run_on_tensor_cores():
    assert emulation._has_wide_product(CARD)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["accurate", "exact", "vsmooth8_expcast", "sage2", "sage3", "fp8_naive", "vsmooth4"])
def test_emulation_equals_the_cpu_back_end(recipe, compiled, recwarn):
    q, k, v = tensors()
    library = vcattn.attention(q, k, v, recipe=recipe, layout="BHSD", grid=GRID)
    state = EmulatedState(Numerics.of(recipe), vcattn.Schedule(1, "every_step"), GRID)
    numerics, order = state.prepare(v, 0)  # in host memory: a tie of k-means would move a whole order
    q, k, v = (x.to(CARD) for x in (q, k, v))
    order = None if order is None else order.to(CARD)
    for _ in range(2):  # the first compiled call is the check
        assert distance(attention(q, k, v, numerics, order, compiled=compiled), library) < APART
    assert not any("without torch.compile" in str(w.message) for w in recwarn)


@pytest.mark.parametrize("recipe", ["accurate", "vsmooth8", "accurate,v_order=balanced"])
def test_orders_made_on_the_card_are_as_good(recipe):
    q, k, v = tensors()
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double()).float()
    library = vcattn.attention(q, k, v, recipe=recipe, layout="BHSD", grid=GRID)
    q, k, v = (x.to(CARD) for x in (q, k, v))
    state = EmulatedState(Numerics.of(recipe), vcattn.Schedule(1, "every_step"), GRID)
    assert distance(attention(q, k, v, *state.prepare(v, 0)), exact) < 1.05 * distance(library, exact)


def test_torchs_kernels_run():
    q, k, v = (x.to(CARD).bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    cudnn, flash = (routing.TorchEngine(recipe, CARD).at(0)(0, q, k, v) for recipe in (BF16, FLOOR))
    torch.testing.assert_close(cudnn, flash, atol=0.02, rtol=0.02)


@pytest.mark.skipif(
    not any(b.available and b.name == "sm90a" for b in vcattn.backends()), reason="needs the back end sm90a"
)
@pytest.mark.parametrize("recipe", ["accurate", "exact", "fast", "vsmooth8", "attn_qat"])
def test_engines_of_the_card(recipe):
    engine = routing.engine_of(Run(recipe, recipe), 8, GRID, CARD, 128)
    assert engine.engine == (routing.EMULATED if recipe == "attn_qat" else "vcattn sm90a")
    q, k, v = (x.to(CARD).bfloat16() for x in tensors())
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for step in (0, 1, 4):  # groups, reuses, does not smooth
        out = engine.at(step)(0, q, k, v).double()
        assert float((out - exact).norm() / exact.norm()) < 0.3
