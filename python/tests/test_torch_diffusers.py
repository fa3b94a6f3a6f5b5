"""The diffusers adapter on diffusers' own model classes, with random weights and tiny sizes, against BF16."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("diffusers", reason="needs diffusers")

from diffusers import (  # noqa: E402
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models import attention_dispatch  # noqa: E402

import vcattn  # noqa: E402
from vcattn import _call  # noqa: E402
from vcattn.integrations import diffusers as adapter  # noqa: E402
from vcattn.integrations.diffusers import attach, register  # noqa: E402

EVERYWHERE = vcattn.Policy(min_seqlen=0)
# 8-bit attention against BF16 attention, at the output of a tiny model with random weights.
BOUND = 0.05


def wan(layers: int = 2) -> tuple[torch.nn.Module, Callable[[float], dict[str, Any]]]:
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=128,
        num_layers=layers,
        rope_max_seq_len=32,
    )
    return model.eval().bfloat16(), lambda t: {
        "hidden_states": torch.randn(1, 4, 3, 16, 16).bfloat16(),
        "timestep": torch.tensor([t]),
        "encoder_hidden_states": torch.randn(1, 7, 32).bfloat16(),
    }


def hunyuan() -> tuple[torch.nn.Module, Callable[[float], dict[str, Any]]]:
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=64,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(16, 24, 24),
    )
    return model.eval().bfloat16(), lambda t: {
        "hidden_states": torch.randn(1, 4, 3, 8, 8).bfloat16(),
        "timestep": torch.tensor([t]),
        "encoder_hidden_states": torch.randn(1, 12, 16).bfloat16(),
        "encoder_attention_mask": (torch.arange(12) < 5)[None].long(),
        "pooled_projections": torch.randn(1, 8).bfloat16(),
        "guidance": torch.tensor([6.0]).bfloat16(),
    }


def hunyuan15() -> tuple[torch.nn.Module, Callable[[float], dict[str, Any]]]:
    torch.manual_seed(0)
    model = HunyuanVideo15Transformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=64,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=8,
        image_embed_dim=12,
        rope_axes_dim=(16, 24, 24),
        target_size=16,
        task_type="t2v",
    )
    return model.eval().bfloat16(), lambda t: {
        "hidden_states": torch.randn(1, 4, 2, 8, 8).bfloat16(),
        "timestep": torch.tensor([t]).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 12, 16).bfloat16(),
        "encoder_attention_mask": (torch.arange(12) < 5)[None].long(),
        "encoder_hidden_states_2": torch.randn(1, 6, 8).bfloat16(),
        "encoder_attention_mask_2": (torch.arange(6) < 4)[None].long(),
        "image_embeds": torch.zeros(1, 3, 12).bfloat16(),
    }


def cogvideox() -> tuple[torch.nn.Module, Callable[[float], dict[str, Any]]]:
    torch.manual_seed(0)
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=4,
        out_channels=4,
        time_embed_dim=16,
        text_embed_dim=16,
        num_layers=2,
        sample_width=16,
        sample_height=16,
        sample_frames=9,
        max_text_seq_length=8,
    )
    return model.eval().bfloat16(), lambda t: {
        "hidden_states": torch.randn(1, 3, 4, 16, 16).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 8, 16).bfloat16(),
        "timestep": torch.tensor([int(t)]),
    }


MODELS = {"wan": wan, "hunyuanvideo": hunyuan, "hunyuanvideo-1.5": hunyuan15, "cogvideox": cogvideox}


def run(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0].float()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(autouse=True)
def nothing_is_left():
    active = attention_dispatch._AttentionBackendRegistry._active_backend
    sdpa = torch.nn.functional.scaled_dot_product_attention
    yield
    assert attention_dispatch._AttentionBackendRegistry._active_backend is active
    assert torch.nn.functional.scaled_dot_product_attention is sdpa


@pytest.mark.parametrize("name", MODELS)
def test_output_is_that_of_bf16(name: str):
    model, inputs = MODELS[name]()
    arguments = inputs(500.0)
    expected = run(model, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with attach(model, policy=vcattn.Policy("accurate", {"*refiner*": "native"}, min_seqlen=0)) as report:
            found = run(model, arguments)
    assert 0 < difference(found, expected) < BOUND
    assert report.served >= 2 and all(reason.startswith("policy") for reason in report.fallbacks), report
    assert torch.equal(run(model, arguments), expected)  # detached
    processors = [m.processor for m in model.modules() if hasattr(m, "processor")]
    assert all(getattr(processor, "_attention_backend", None) is None for processor in processors)


@pytest.mark.parametrize("name", MODELS)
def test_native_layers_are_exactly_bf16(name: str):
    model, inputs = MODELS[name]()
    arguments = inputs(500.0)
    expected = run(model, arguments)
    with attach(model, policy="native") as report:
        assert torch.equal(run(model, arguments), expected)
    assert report.served == 0 and sum(report.fallbacks.values()) >= 2


def test_layers_by_name():
    model, inputs = wan(layers=3)
    seen: list[str | None] = []
    handle = attach(model, policy=EVERYWHERE)
    attend = handle.session.attend
    handle.session.attend = lambda *args, **options: (seen.append(options["layer"]), attend(*args, **options))[1]
    run(model, inputs(1.0))
    handle.detach()
    assert seen == [f"blocks.{i}.attn{j}" for i in range(3) for j in (1, 2)]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("wan", [None] * 4),
        ("hunyuanvideo", [(0, 1, 1, 192)] * 2),  # a double and a single block
        ("hunyuanvideo-1.5", [(0, 1, 1, 128)] * 2),
        ("cogvideox", [(8, 1, 1, 192)] * 2),
    ],
)
def test_text_stays_out_of_the_videos_order(name: str, expected: list, monkeypatch: pytest.MonkeyPatch):
    model, inputs = MODELS[name]()
    arguments = inputs(500.0)
    grids: list[Any] = []
    attention = _call.attention

    def recorded(arrays: Any, q: Any, k: Any, v: Any, options: _call.Options, **others: Any):
        grids.append(options.grid)
        return attention(arrays, q, k, v, options, **others)

    monkeypatch.setattr(_call, "attention", recorded)
    native = {"*refiner*": "native"}
    with attach(model, policy=vcattn.Policy("accurate", native, min_seqlen=0)) as report:
        run(model, arguments)
    assert grids == expected and report.served == len(expected), report
    # Orders that do not cluster have no use for the number of tokens.
    grids.clear()
    with attach(model, policy=vcattn.Policy("sage2", native, min_seqlen=0)):
        run(model, arguments)
    assert grids == [None] * len(expected)


def test_short_calls_stay_native_by_default():
    model, inputs = wan()
    arguments = inputs(1.0)
    expected = run(model, arguments)
    with attach(model) as report:
        assert torch.equal(run(model, arguments), expected)
    assert list(report.fallbacks.values()) == [4]


class Pipeline:
    """What attach needs of a pipeline; the loop is that of WanPipeline: CFG as two calls, two experts by the step."""

    def __init__(self) -> None:
        self.transformer, self.inputs = wan()
        self.transformer_2, _ = wan()
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def __call__(self, steps: int) -> torch.Tensor:
        torch.manual_seed(1)
        self.scheduler.set_timesteps(steps)
        latents, texts = torch.randn(1, 4, 3, 16, 16), torch.randn(2, 1, 7, 32).bfloat16()
        for index, t in enumerate(self.scheduler.timesteps):
            expert = self.transformer if index < steps // 2 else self.transformer_2
            cond, uncond = (
                run(expert, {"hidden_states": latents.bfloat16(), "timestep": t[None], "encoder_hidden_states": text})
                for text in texts
            )
            latents = self.scheduler.step(uncond + 3 * (cond - uncond), t, latents, return_dict=False)[0]
        return latents


def test_a_request_with_cfg_and_two_experts(groupings: list[bool]):
    pipe = Pipeline()
    expected = pipe(8)
    policy = vcattn.Policy(layers={"*.attn2": "native"}, min_seqlen=0)
    with attach(pipe, policy=policy, schedule="every_step") as report:
        found = pipe(8)
        assert difference(found, expected) < BOUND
        # 2 layers x 2 branches x 8 steps. By the schedule steps 0, 2, 4 and 6 regroup: cold for each expert, then warm.
        assert report.served == 32
        assert groupings.count(False) == 2 * 2 * 2 and groupings.count(True) == 2 * 2 * 2
        groupings.clear()
        assert torch.equal(pipe(8), found)  # a new request keeps nothing of the last one
        assert groupings.count(False) == 8
    assert torch.equal(pipe(8), expected)
    assert "step" not in vars(pipe.scheduler) and "set_timesteps" not in vars(pipe.scheduler)


def test_first_and_last_steps_are_exactly_bf16():
    pipe = Pipeline()
    expected = pipe(4)
    with attach(pipe, policy=vcattn.Policy(native_first=2, native_last=2, min_seqlen=0)) as report:
        assert torch.equal(pipe(4), expected)
    assert set(report.fallbacks) == {"policy: first 2 steps", "policy: last 2 steps"} and report.served == 0
    with attach(pipe, policy=vcattn.Policy(native_first=1, native_last=2, min_seqlen=0)) as report:
        pipe(4)
    assert report.served == 2 * 2 * 2


def test_layers_of_the_second_expert_have_its_name():
    pipe = Pipeline()
    with attach(pipe, policy=vcattn.Policy(layers={"transformer_2.*": "native"}, min_seqlen=0)) as report:
        pipe(4)
    assert report.served == 2 * 2 * 2 * 2 and report.fallbacks == {"policy: layer transformer_2.*": 16}


def test_an_exception_in_the_model_leaves_nothing_behind():
    model, inputs = wan()
    arguments = inputs(1.0)
    expected = run(model, arguments)
    with pytest.raises(RuntimeError), attach(model, policy=EVERYWHERE):
        run(model, {**arguments, "encoder_hidden_states": torch.zeros(1, 7, 31)})
    assert torch.equal(run(model, arguments), expected)


def test_by_diffusers_own_means(monkeypatch: pytest.MonkeyPatch):
    model, inputs = wan()
    arguments = inputs(1.0)
    expected = run(model, arguments)
    assert register() is register()
    with attention_dispatch.attention_backend("vcattn"):
        assert torch.equal(run(model, arguments), expected)  # short calls: native
    monkeypatch.setattr(adapter._unattached, "policy", EVERYWHERE)
    q, k, v = (torch.randn(1, 700, 1, 64).bfloat16() for _ in range(3))
    with attention_dispatch.attention_backend("vcattn"), torch.no_grad():
        served = attention_dispatch.dispatch_attention_fn(q, k, v)
    assert torch.equal(served, vcattn.attention(q, k, v))


def test_context_parallelism_is_refused():
    model, _ = wan()
    q = torch.randn(1, 8, 1, 64)
    with attention_dispatch.attention_backend(register()), pytest.raises(vcattn.UnsupportedError, match="context"):
        attention_dispatch.dispatch_attention_fn(q, q, q, parallel_config=object())
    processor = model.blocks[0].attn1.processor
    processor._parallel_config = object()
    with pytest.raises(vcattn.UnsupportedError, match="context"):
        attach(model)
    assert getattr(processor, "_attention_backend", None) is None


def test_every_argument_that_diffusers_passes_is_named():
    """diffusers drops arguments that a backend does not name."""
    backend = register()
    named = attention_dispatch._AttentionBackendRegistry._supported_arg_names[backend]
    native = attention_dispatch._AttentionBackendRegistry._supported_arg_names[
        attention_dispatch.AttentionBackendName.NATIVE
    ]
    assert native <= named


@pytest.mark.filterwarnings("ignore:vcattn")
def test_masks_are_honoured_or_left_to_the_native_backend(monkeypatch: pytest.MonkeyPatch):
    backend = register()
    monkeypatch.setattr(adapter._unattached, "policy", EVERYWHERE)
    q, k, v = (torch.randn(2, 700, 1, 64).bfloat16() for _ in range(3))
    keys = torch.arange(700) < torch.tensor([[300], [700]])
    masks = [keys, keys[:, None, None], torch.randn(2, 1, 1, 700).bfloat16()]
    for mask in masks:
        with torch.no_grad():
            found = attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
            expected = attention_dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask)
        assert difference(found.float(), expected.float()) < BOUND
        assert torch.equal(found, expected) == (mask is masks[2])


def test_schedules_that_there_are_not_are_refused():
    model, _ = wan()
    with pytest.raises(vcattn.InvalidArgumentError, match="schedule kind"):
        attach(model, schedule="sometimes")


def test_what_cannot_be_attached_to():
    with pytest.raises(vcattn.InvalidArgumentError, match="found Linear"):
        attach(torch.nn.Linear(1, 1))


traceable = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 6), reason="torch 2.5 cannot trace diffusers' dispatch"
)


@traceable
@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_compiled_blocks(name: str):
    """Regional compilation, as diffusers does it, without a graph break."""
    torch._dynamo.reset()
    model, inputs = MODELS[name]()
    arguments = inputs(500.0)
    expected = run(model, arguments)
    with attach(model, policy=EVERYWHERE):
        for block in model.blocks if name == "wan" else model.transformer_blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        found = run(model, arguments)
    assert 0 < difference(found, expected) < BOUND


@traceable
@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_a_compiled_model(name: str):
    """The whole model, with a graph break where it is entered."""
    torch._dynamo.reset()
    model, inputs = MODELS[name]()
    arguments = inputs(500.0)
    expected = run(model, arguments)
    with attach(model, policy=EVERYWHERE):
        found = run(torch.compile(model, backend="aot_eager"), arguments)
    assert 0 < difference(found, expected) < BOUND
