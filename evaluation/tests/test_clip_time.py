"""The clip's arithmetic, the model's configuration, and one small model through the diffusers adapter on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("diffusers", reason="needs diffusers")

from evaluation.clip_time import __main__ as clip_time  # noqa: E402
from evaluation.clip_time import hunyuan, wan  # noqa: E402
from evaluation.clip_time.shapes import VideoShape  # noqa: E402

import vcattn  # noqa: E402

CPU = torch.device("cpu")
TINY = {
    **wan.CONFIG,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "ffn_dim": 64,
    "text_dim": 16,
    "num_layers": 2,
}
SHORT = VideoShape("short", 5, 128, 256)  # 2 latent frames of 16 x 32: 256 tokens


def test_published_shapes():
    assert wan.tokens(wan.SHAPES["480p"]) == 32760
    assert wan.tokens(wan.SHAPES["720p"]) == 75600
    assert wan.tokens(SHORT) == 256


def test_published_size():
    """14.3 and 8.3 billion parameters."""
    from diffusers import HunyuanVideo15Transformer3DModel, WanTransformer3DModel

    with torch.device("meta"):
        models = WanTransformer3DModel(**wan.CONFIG), HunyuanVideo15Transformer3DModel(**hunyuan.CONFIG)
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    assert sizes == pytest.approx([14.29e9, 8.33e9], rel=1e-3)


def test_step_kinds():
    """40 steps of which 10 smooth, in threes of one grouping for four steps."""
    kinds = clip_time.step_kinds(vcattn.Schedule(40, "first_quarter"))
    assert {key: len(steps) for key, steps in kinds.items()} == {
        (True, True, False): 1,
        (True, False, False): 7,
        (True, True, True): 2,
        (False, False, False): 30,
    }


def test_clip_arithmetic():
    kinds = [
        {"steps": 10, "seconds": 2.0, "self_attention_seconds": 1.0},
        {"steps": 30, "seconds": 1.0, "self_attention_seconds": 0.5},
    ]
    found = clip_time.finish({"step_kinds": kinds})
    assert found["clip_seconds"] == 100.0
    assert found["forward_seconds"] == 1.25
    assert found["self_attention_share"] == 0.5


def test_speed_up_and_prediction():
    base = {"forward_seconds": 10.0, "self_attention_seconds": 6.0, "self_attention_share": 0.6, "clip_seconds": 800.0}
    recipe = {
        "forward_seconds": 8.0,
        "self_attention_seconds": 3.0,
        "self_attention_share": 0.375,
        "clip_seconds": 640.0,
    }
    rows = {name: {**row, "peak_memory_bytes": 2**30} for name, row in (("cuDNN BF16", base), ("accurate", recipe))}
    line = clip_time.table({"720p": rows}).splitlines()[-1]
    assert "| 1.25 | 1.43 | 1.0 | 640 |" in line  # 10 / 8, 10 / (4 + 3)


def test_other_schedules():
    """Of the same forwards: 1 cold and 9 warm groupings and 30 steps of reuse, or 1 and 39, or 40 without smoothing."""
    kinds = [
        (1, True, True, False, 5.0),
        (7, True, False, False, 2.0),
        (2, True, True, True, 4.0),
        (30, False, False, False, 1.0),
    ]
    names = ("steps", "smooth", "regroup", "warm", "seconds")
    found = clip_time.finish({"step_kinds": [dict(zip(names, kind), self_attention_seconds=0.5) for kind in kinds]})
    lines = clip_time.schedule_table({"720p": {"accurate": found}}).splitlines()[2:]
    assert found["clip_seconds"] == 2 * (5 + 14 + 8 + 30)
    assert [line.split(" | ")[-2] for line in lines] == ["202.0", "322.0", "80.0"]
    assert lines[0].endswith("| +77.2% |")


def test_small_model_through_the_adapter(tmp_path):
    """Weights are finite and of diffusers' dtypes, and every call is served and timed."""
    model = wan.build(TINY, CPU)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert model.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    policy = vcattn.Policy("accurate", min_seqlen=wan.tokens(SHORT) - 1)
    inputs = wan.inputs(TINY, SHORT, CPU)
    rows = dict(
        clip_time.measure_shape(
            model, inputs, {"accurate": policy}, "first_quarter", repeats=1, baseline="_native_math"
        )
    )
    base, found = rows["cuDNN BF16"], rows["accurate"]
    assert base["clip_seconds"] == pytest.approx(2 * 40 * base["forward_seconds"])
    assert [row["steps"] for row in found["step_kinds"]] == [1, 7, 2, 30]
    # Warm-up of one layer and one repeat of two; self- and cross-attention.
    assert [len(row["samples"]) for row in found["step_kinds"]] == [2, 1, 1, 2]
    assert (found["served"], found["fallbacks"]) == ((1 + 2) * (2 + 1 + 1 + 2) * 2, {})
    assert len(model.blocks) == 2
    for row in rows.values():
        assert 0 < row["self_attention_seconds"] < row["forward_seconds"]
    text = clip_time.write(tmp_path, {"command": "the command", "layers": 2}, {"short": rows})
    assert all(words in text for words in ("the command", "layers 2", "| short | accurate |"))


def test_small_hunyuan_model_through_the_adapter():
    """Joint attention with masked text: served with a mask of keys."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 32, "num_layers": 2, "rope_axes_dim": (8, 12, 12)}
    config = {**hunyuan.CONFIG, **sizes, "in_channels": 5, "text_embed_dim": 16}
    model = hunyuan.build(config, CPU)
    shape = VideoShape("short", 5, 64, 128)  # 2 latent frames of 4 x 8, and 1985 tokens of text and image
    policy = vcattn.Policy("accurate", min_seqlen=hunyuan._TEXT)  # not the text's own attention
    inputs = hunyuan.inputs(config, shape, CPU)
    rows = dict(clip_time.measure_shape(model, inputs, {"accurate": policy}, "first_quarter", 1, "_native_math"))
    assert rows["accurate"]["served"] == (1 + 2) * (2 + 1 + 1 + 2)
    assert list(rows["accurate"]["fallbacks"]) == [f"at most {hunyuan._TEXT} queries or keys (min_seqlen)"]
    assert len(model.transformer_blocks) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_refuses_without_a_card():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "evaluation.clip_time"],
        cwd=root,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": "python"},
    )
    assert done.returncode == 1
    assert "needs a CUDA card" in done.stderr
