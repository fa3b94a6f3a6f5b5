"""Model, sampler and routing, at a tiny size with random weights."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as functional  # noqa: E402
from evaluation.video import clips, routing, sampler  # noqa: E402
from evaluation.video.experiments import BF16, FLOOR, GROUPS, Run  # noqa: E402
from evaluation.video.model import ModelSize, VideoTransformer, rope_angles  # noqa: E402

import vcattn  # noqa: E402

SIZE = ModelSize(width=64, heads=2, depth=2, patch=(1, 2, 2), text_tokens=4, labels=3)
GRID = (2, 12, 12)  # 288 video tokens: a few tiles
STEPS = 4
CPU = torch.device("cpu")


def tiny_model() -> VideoTransformer:
    torch.manual_seed(0)
    return VideoTransformer(SIZE).eval().requires_grad_(False)


def clip() -> torch.Tensor:
    frames = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), dtype=np.uint8)
    return clips.to_tokens(frames, SIZE.patch)


def engine(recipe: str, *, emulate: bool = False, schedule: str = "first_quarter") -> routing.Engine:
    run = Run(recipe, recipe, schedule)
    return routing.engine_of(run, STEPS, (SIZE.text_tokens, *GRID), CPU, SIZE.head_dim, emulate=emulate)


def render(attention, seed: int = 0, steps: list[torch.Tensor] | None = None) -> torch.Tensor:
    def keep(step: int, prediction: torch.Tensor) -> None:
        if steps is not None:
            steps.append(prediction)

    return sampler.render(tiny_model(), clip(), 1, GRID, seed, STEPS, attention.at, keep)


def test_tokens_and_frames():
    """Known places: a token is a patch of pixels, rows first; and back."""
    frames = np.zeros((2, 24, 24, 3), dtype=np.uint8)
    frames[1, 2, 5, 1] = 255  # frame 1, row 1 of patch row 1, column 1 of patch column 2, green
    tokens = clips.to_tokens(frames, SIZE.patch)
    assert tokens.shape == (1, 288, 12)
    assert (tokens == 2).nonzero().tolist() == [[0, 144 + 12 + 2, 0 * 6 + 1 * 3 + 1]]
    assert torch.equal((clips.to_frames(tokens, GRID, SIZE.patch) * 255).round().byte(), torch.from_numpy(frames))


def test_sampler_is_deterministic():
    assert torch.equal(render(engine(BF16)), render(engine(BF16)))
    assert not torch.equal(render(engine(BF16), seed=0), render(engine(BF16), seed=1))


def test_last_prediction_is_the_result():
    steps: list[torch.Tensor] = []
    result = render(engine(BF16), steps=steps)
    assert len(steps) == STEPS
    torch.testing.assert_close(steps[-1], result)


def test_a_model_that_knows_the_answer_gives_it():
    """Euler steps of an exact prediction lead to it, from any noise."""

    seen: list[tuple[float, torch.Tensor]] = []

    class Oracle(torch.nn.Module):
        size = SIZE

        def forward(self, x, time, label, angles, attention):
            seen.append((float(time), x))
            return clip()

    result = sampler.render(Oracle(), clip(), 0, GRID, 0, STEPS, lambda step: None)
    torch.testing.assert_close(result, clip())
    noise = torch.randn(clip().shape, generator=torch.Generator().manual_seed(0))
    assert [time for time, _ in seen] == pytest.approx([0.6, 0.45, 0.3, 0.15])
    for time, x in seen:  # on the straight line from the noise to the clip
        torch.testing.assert_close(x, (1 - time) * clip() + time * noise)


def test_rope_keeps_text_and_turns_by_relative_place():
    angles = rope_angles((2, 3, 4), 5, 128)
    assert angles.shape == (5 + 24, 64)
    assert not angles[:5].any()
    # Next frame, row and column: (time, height, width) have 22, 21 and 21 frequencies, the first of each 1.
    assert angles[5 + 12].tolist()[:1] + angles[5 + 4].tolist()[22:23] + angles[5 + 1].tolist()[43:44] == [
        1.0,
        1.0,
        1.0,
    ]
    assert not angles[5 + 12, 22:].any()


@pytest.mark.parametrize("emulate", [False, True])
def test_routing_changes_attention_only(emulate):
    """Every call of the model goes to the engine, with equal inputs at the first; and only its output differs."""
    calls: list[tuple[int, int]] = []
    reference, routed = engine(BF16), engine("accurate", emulate=emulate)
    assert routed.engine == (routing.EMULATED if emulate else "vcattn cpu")

    class Spy:
        def at(self, step):
            def attend(layer, q, k, v):
                calls.append((step, layer))
                out = routed.at(step)(layer, q, k, v)
                assert out.shape == q.shape and out.dtype == q.dtype
                return reference.at(step)(layer, q, k, v)

            return attend

    assert torch.equal(render(Spy()), render(reference))
    assert calls == [(step, layer) for step in range(STEPS) for layer in range(SIZE.depth)]
    assert not torch.equal(render(routed), render(engine(BF16)))


@pytest.mark.parametrize("recipe", ["accurate", "vsmooth8_expcast", "sage3"])
def test_emulated_calls_have_the_librarys_error(recipe):
    """At every step and layer; inputs are equal at the first call, and later drift by where BF16 rounds. (So much that
    the clips themselves cannot be compared.)"""
    errors = []
    for emulate in (False, True):
        probe = routing.Probe(engine(recipe, emulate=emulate), set(range(STEPS)), routing.TorchEngine(BF16, CPU))
        render(probe)
        errors.append(np.array(list(probe.relative_l2().values())))
    assert errors[0].shape == (STEPS, SIZE.depth)
    np.testing.assert_allclose(errors[0][0, 0], errors[1][0, 0], rtol=0.005)
    np.testing.assert_allclose(errors[0], errors[1], rtol=0.1)


@pytest.mark.parametrize("emulate", [False, True])
def test_layers_keep_their_own_orders(emulate):
    """A layer's reused order is its own, whatever another layer did in between."""
    tokens = SIZE.text_tokens + 288
    first, second = torch.randn(2, 1, 2, tokens, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = []
    for layers in ([(0, first)], [(0, first), (1, second)]):
        run = Run("accurate", "accurate", "every_step", reuse=2)
        made = routing.engine_of(run, STEPS, (SIZE.text_tokens, *GRID), CPU, 32, emulate=emulate)
        for layer, x in layers:
            made.at(0)(layer, x, x, x)
        outputs.append(made.at(1)(0, first, first, first))
    assert torch.equal(*outputs)


def test_schedules_and_recipes_differ():
    made = [render(engine("accurate", schedule=kind)) for kind in ("first_quarter", "every_step", "never")]
    made += [render(engine(recipe)) for recipe in ("exact", "fast", "fp8_naive")]
    assert all(not torch.equal(a, b) for i, a in enumerate(made) for b in made[:i])


def test_probe_measures_each_layer():
    probe = routing.Probe(engine("fp8_naive"), {0, 2}, routing.TorchEngine(BF16, CPU))
    plain = render(engine("fp8_naive"))
    assert torch.equal(render(probe), plain)
    errors = probe.relative_l2()
    assert list(errors) == [0, 2]
    assert all(len(layers) == SIZE.depth and all(1e-3 < error < 0.5 for error in layers) for layers in errors.values())
    floor = routing.Probe(engine(FLOOR), {0}, routing.TorchEngine(BF16, CPU))
    render(floor)
    assert max(floor.relative_l2()[0]) < min(errors[0])


def test_every_run_is_a_recipe():
    """Each names a recipe of the library, with a schedule, and has a name of its own."""
    runs = {run for group in GROUPS.values() for run in group}
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        vcattn.Schedule(40, run.schedule, run.reuse)
        if not run.is_torch:
            vcattn.Recipe(run.recipe)


def test_two_bf16_kernels_differ():
    q, k, v = torch.randn(3, 1, 2, 300, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    outputs = [routing.TorchEngine(recipe, CPU).at(0)(0, q, k, v) for recipe in (BF16, FLOOR)]
    assert not torch.equal(*outputs)
    for out in outputs:
        torch.testing.assert_close(
            out.float(), functional.scaled_dot_product_attention(*(x.float() for x in (q, k, v))), atol=0.02, rtol=0.02
        )
