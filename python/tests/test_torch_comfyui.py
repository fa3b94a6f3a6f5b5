"""The ComfyUI node against its host's contract, as comfy/ldm/modules/attention.py has it: functions wrapped so that
transformer_options["optimized_attention_override"] is called with the function first."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import vcattn  # noqa: E402
from vcattn.integrations.comfyui import NODE_CLASS_MAPPINGS, attach, layer_name  # noqa: E402

HEADS, DIM, TOKENS = 2, 64, 150
BOUND = 0.06


class ModelPatcher:
    """What the node needs of ComfyUI's."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.model_options = options or {"transformer_options": {}}

    def clone(self) -> ModelPatcher:
        return ModelPatcher(
            copy.copy(self.model_options)
            | {"transformer_options": dict(self.model_options.get("transformer_options", {}))}
        )


def wrapped(function: Any) -> Any:
    """An attention function as ComfyUI's models call it."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        options = kwargs.get("transformer_options") or {}
        if "_inside_attn_wrapper" not in kwargs and "optimized_attention_override" in options:
            return options["optimized_attention_override"](function, *args, **kwargs, _inside_attn_wrapper=True)
        return function(*args, **kwargs)

    return wrapper


@wrapped
def optimized_attention(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **options):
    if not skip_reshape:
        q, k, v = (x.view(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[None] if mask.ndim == 2 else mask
        mask = mask[:, None] if mask.ndim == 3 else mask
    scale, gqa = options.get("scale"), options.get("enable_gqa", False)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return out if skip_output_reshape else out.transpose(1, 2).reshape(q.shape[0], -1, heads * q.shape[-1])


def tensors(seed: int = 0, skip_reshape: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, HEADS, TOKENS, DIM) if skip_reshape else (1, TOKENS, HEADS * DIM)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).norm() / expected.norm())


def options_of(model: ModelPatcher, **more: Any) -> dict[str, Any]:
    return {**model.model_options["transformer_options"], **more}


EVERYWHERE = vcattn.Policy(min_seqlen=0)


@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
def test_layouts(skip_reshape: bool, skip_output_reshape: bool):
    q, k, v = tensors(skip_reshape=skip_reshape)
    layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    expected = optimized_attention(q, k, v, HEADS, **layout)
    model = attach(ModelPatcher(), policy=EVERYWHERE)
    found = optimized_attention(q, k, v, heads=HEADS, transformer_options=options_of(model), **layout)
    assert 0 < difference(found, expected) < BOUND


def test_the_given_model_is_not_changed():
    given = ModelPatcher()
    attach(given)
    assert given.model_options == {"transformer_options": {}}


@pytest.mark.filterwarnings("ignore:vcattn")
@pytest.mark.parametrize(
    "mask, honoured",
    [
        ((torch.arange(TOKENS) < 100).expand(TOKENS, TOKENS), True),
        ((torch.arange(TOKENS) < 100).expand(1, 1, TOKENS, TOKENS), True),
        (torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), False),
        (torch.randn(1, TOKENS, TOKENS), False),
    ],
)
def test_masks_are_honoured_or_left_to_the_host(mask: torch.Tensor, honoured: bool):
    q, k, v = tensors()
    expected = optimized_attention(q, k, v, HEADS, mask)
    model = attach(ModelPatcher(), policy=EVERYWHERE)
    found = optimized_attention(q, k, v, HEADS, mask, transformer_options=options_of(model))
    assert difference(found, expected) < BOUND and torch.equal(found, expected) != honoured


def test_unknown_arguments_and_full_precision_are_left_to_the_host():
    q, k, v = tensors()
    model = attach(ModelPatcher(), policy=EVERYWHERE)
    report = options_of(model)["optimized_attention_override"].session.report
    with pytest.warns(UserWarning, match="unknown: window"):
        found = optimized_attention(q, k, v, HEADS, transformer_options=options_of(model), window=3)
    assert torch.equal(found, optimized_attention(q, k, v, HEADS))
    optimized_attention(q, k, v, HEADS, transformer_options=options_of(model), low_precision_attention=False)
    assert report.served == 0 and sum(report.fallbacks.values()) == 2
    scaled = optimized_attention(q, k, v, HEADS, transformer_options=options_of(model), scale=0.5)
    assert difference(scaled, optimized_attention(q, k, v, HEADS, scale=0.5)) < BOUND and report.served == 1


def test_an_override_that_was_there_answers_for_the_host():
    seen = []

    def previous(func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(func)
        return func(*args, **kwargs)

    model = attach(ModelPatcher({"transformer_options": {"optimized_attention_override": previous}}))
    optimized_attention(*tensors(), HEADS, transformer_options=options_of(model))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "img_slice, grid",
    [
        (None, None),
        ([30, TOKENS], (30, 1, 1, TOKENS - 30)),
        ([0, 100], (0, 1, 1, 100)),
        ([30, TOKENS + 1], None),  # of another call
        ((10,), None),
        ((10.5, 20), None),
    ],
)
def test_text_stays_out_of_the_order_of_the_slice(img_slice: Any, grid: Any):
    q, k, v = tensors()
    model = attach(ModelPatcher(), policy=EVERYWHERE)
    options = options_of(model, img_slice=img_slice)
    found = optimized_attention(q, k, v, HEADS, transformer_options=options)
    expected = vcattn.attention(*(x.unflatten(-1, (HEADS, DIM)) for x in (q, k, v)), grid=grid, allow_nonfinite=True)
    assert torch.equal(found, expected.flatten(2))
    short = tensors(1)[0][:, :70]  # cross-attention: the keys are text
    cross = optimized_attention(short, k, v, HEADS, transformer_options=options)
    expected = vcattn.attention(*(x.unflatten(-1, (HEADS, DIM)) for x in (short, k, v)), allow_nonfinite=True)
    assert torch.equal(cross, expected.flatten(2))


def test_layer_names():
    assert layer_name({"block_index": 3}) == "blocks.3"
    assert layer_name({"block_index": 3, "block_type": "double"}) == "double_blocks.3"
    assert layer_name({"block": ("input", 4), "block_index": 0}) == "input.4.0"
    assert layer_name({}) is None


def run(model: ModelPatcher, steps: int) -> None:
    """Calls as a sampler makes them: a new noise level tensor every step, CFG branches one by one, two layers."""
    sample_sigmas = torch.linspace(1, 0, steps + 1)
    for step in range(steps):
        sigmas = sample_sigmas[step][None].clone()
        for branch in (0, 1):
            for block in (0, 1):
                options = options_of(
                    model, sigmas=sigmas, sample_sigmas=sample_sigmas, cond_or_uncond=[branch], block_index=block
                )
                optimized_attention(*tensors(step), HEADS, transformer_options=options)


def test_steps_branches_and_layers(groupings: list[bool]):
    policy = vcattn.Policy(layers={"blocks.1": "sage2"}, native_first=1, native_last=1, min_seqlen=0)
    model = attach(ModelPatcher(), policy=policy, schedule="every_step")
    report = options_of(model)["optimized_attention_override"].session.report
    run(model, 8)
    assert report.served == 6 * 4 and dict(report.fallbacks) == {"policy: first 1 steps": 4, "policy: last 1 steps": 4}
    # blocks.0 in two branches; every other step regroups, and the first is made up for at step 1.
    assert groupings == [False, False, True, True, True, True, True, True]
    groupings.clear()
    run(model, 8)
    assert groupings[:2] == [False, False]


@pytest.mark.parametrize(
    "sigmas, sample_sigmas",
    [
        (torch.empty(0), torch.ones(3)),
        (torch.ones(1), torch.empty(0)),
        (torch.ones(1), torch.tensor(1.0)),
        (0.5, [1, 0]),
    ],
)
def test_without_noise_levels_there_is_no_step(sigmas: Any, sample_sigmas: Any):
    model = attach(ModelPatcher(), policy=EVERYWHERE)
    session = options_of(model)["optimized_attention_override"].session
    options = options_of(model, sigmas=sigmas, sample_sigmas=sample_sigmas)
    optimized_attention(*tensors(), HEADS, transformer_options=options)
    assert session.report.served == 1 and session.step is None


def test_schedules_that_there_are_not_are_refused():
    with pytest.raises(vcattn.InvalidArgumentError, match="found 'sometimes'"):
        attach(ModelPatcher(), schedule="sometimes")


def test_node():
    node = NODE_CLASS_MAPPINGS["VCAttention"]()
    inputs = node.INPUT_TYPES()["required"]
    arguments = {
        name: kind[0][0] if isinstance(kind[0], list) else kind[1]["default"]
        for name, kind in inputs.items()
        if name != "model"
    }
    (model,) = node.apply(ModelPatcher(), **{**arguments, "native_layers": "blocks.0, blocks.9", "min_tokens": 0})
    session = options_of(model)["optimized_attention_override"].session
    assert session.policy == vcattn.Policy("auto", {"blocks.0": "native", "blocks.9": "native"}, min_seqlen=0)
    assert (node.RETURN_TYPES, node.FUNCTION) == (("MODEL",), "apply")
