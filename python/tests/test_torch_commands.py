"""python -m vcattn capture, sensitivity, bench and plot."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("safetensors", reason="needs safetensors")

import torch.nn.functional as F  # noqa: E402

from vcattn import captures, sensitivity  # noqa: E402
from vcattn.__main__ import main  # noqa: E402
from vcattn.capturing import capturing  # noqa: E402
from vcattn.policy import Policy  # noqa: E402

MODEL = """
import torch
import torch.nn.functional as F

class Attention(torch.nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x * 2, x + 1, scale=0.2)

class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x, timestep):
        for block in self.blocks:
            x = block(x)
        return x

class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x)

def run(steps=3):
    torch.manual_seed(0)
    denoiser, x = Denoiser(), Encoder()(torch.randn(1, 2, 140, 64))
    for step in range(steps):
        timestep = torch.tensor([1000.0 - 100 * step])
        x = denoiser(x, timestep=timestep) + denoiser(x, timestep)
    return x
"""


def load_model() -> dict:
    namespace: dict = {}
    exec(MODEL, namespace)
    return namespace


def test_capturing(tmp_path: Path):
    model, original, module_call = load_model(), F.scaled_dot_product_attention, torch.nn.Module.__call__
    expected = model["run"]()
    with capturing(tmp_path, layers=["blocks.[02]"], steps=[0, 2], min_seqlen=0, num_steps=3) as files:
        assert torch.equal(model["run"](), expected)
    assert F.scaled_dot_product_attention is original and torch.nn.Module.__call__ is module_call
    found = [captures.load(file) for file in files]
    assert {(c.layer, c.step, c.branch) for c in found} == {
        (f"blocks.{layer}", step, branch) for layer in (0, 2) for step in (0, 2) for branch in (0, 1)
    }
    assert len(files) == 8 and all(c.num_steps == 3 and c.scale == 0.2 for c in found)
    first = found[0]
    assert first.q.shape == (1, 140, 2, 64) and torch.equal(first.k, first.q * 2)


def test_files_hold_what_tensors_say(tmp_path: Path):
    """Negated views, and one tensor as q, k and v, of a single head."""
    x = torch.randn(1, 140, 1, 64)
    found = captures.load(captures.save(captures.Capture(x, x, torch._neg_view(x), "a"), tmp_path))
    assert torch.equal(found.q, x) and torch.equal(found.k, x) and torch.equal(found.v, -x)


def test_capturing_ends_with_an_exception(tmp_path: Path):
    original, module_call = F.scaled_dot_product_attention, torch.nn.Module.__call__
    with pytest.raises(ZeroDivisionError), capturing(tmp_path):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is original and torch.nn.Module.__call__ is module_call


def test_a_second_run_starts_at_step_0_and_the_limit_holds(tmp_path: Path):
    model = load_model()
    with capturing(tmp_path, layers=["blocks.1"], min_seqlen=0, limit=7) as files:
        model["run"]()
        model["run"]()
    assert len(set(files)) == 7
    assert [(c.run, c.step) for c in map(captures.load, files)] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 1),
        (0, 2),
        (0, 2),
        (1, 0),
    ]


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"attn_mask": torch.ones(140, 140, dtype=torch.bool)}, "attn_mask"),
        ({"is_causal": True}, "is_causal"),
        ({"dropout_p": 0.1}, "dropout"),
    ],
)
def test_calls_that_files_cannot_tell_are_left_out(tmp_path: Path, options: dict, reason: str):
    class Denoiser(torch.nn.Module):
        def forward(self, x, timestep):
            return F.scaled_dot_product_attention(x, x, x, **options)

    block = capturing(tmp_path, min_seqlen=0)
    with pytest.warns(UserWarning, match=reason), block as files:
        Denoiser()(torch.zeros(1, 2, 140, 64), 3.0)
    assert not files and [reason in found for found in block.report.fallbacks] == [True]


@pytest.mark.parametrize("failure", ["ValueError", "ImportError", "OSError", "KeyError"])
def test_errors_of_the_script_are_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str], failure: str):
    script = tmp_path / "script.py"
    script.write_text(f"def inner():\n    raise {failure}('mine')\ninner()\n")
    assert main(["capture", "--out", str(tmp_path / "c"), "--", str(script)]) == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "in inner" in shown and f"{failure}: " in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["capture", "--out", "c", "--", "nothing.py"],
        ["sensitivity", "folder"],
        ["sensitivity", "folder", "--policy", "policy.json"],
        ["sensitivity", "text.py"],
        ["sensitivity", "nothing"],
        ["bench", "1,8,1,64", "--device", "foo"],
        ["bench", "1,8,1,64", "--device", "meta"],
        ["bench", "1,8,1,64", "--device", "cpu", "--repeats", "0"],
        ["plot", "bench.json", "p.png"],
        ["plot", "sensitivity.json", "p.png"],
        ["plot", "list.json", "p.png"],
    ],
)
def test_one_line_for_what_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name, text in (
        ("text.py", "print()\n"),
        ("bench.json", '{"kind": "bench"}'),
        ("sensitivity.json", '{"kind": "sensitivity", "calls": [{}]}'),
        ("list.json", "[]"),
    ):
        Path(name).write_text(text)
    assert main(arguments) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("vcattn: ") and shown.err.count("\n") == 1 and not Path("policy.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_bench_without_a_device(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "1,8,1,64", "--device", "cuda"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


TOOL = Path(__file__).resolve().parents[2] / "build/cli/vcattn"


@pytest.mark.skipif(not TOOL.exists(), reason="needs the tool: make build")
def test_compare_reads_captures(tmp_path: Path):
    with capturing(tmp_path, layers=["blocks.1"], steps=[1], min_seqlen=0) as files:
        load_model()["run"]()
    command = [str(TOOL), "compare", str(files[0]), "--recipes", "accurate", "--orders", "none", "--json", "-"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    measured = sensitivity(files[:1], recipes=["accurate"]).measurements[0].errors["accurate"]
    assert found["input"]["shape"]["seqlen_kv"] == 140
    assert found["recipes"][0]["rel_l2"] == pytest.approx(measured, rel=0.1)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "script.py").write_text(MODEL + "\nrun()\n")
    out = tmp_path / "captures"
    assert (
        main(["capture", "--out", str(out), "--steps", "1", "--min-seqlen", "0", "--", str(tmp_path / "script.py")])
        == 0
    )
    policy, numbers, picture = tmp_path / "policy.json", tmp_path / "sensitivity.json", tmp_path / "s.png"
    arguments = [
        "--recipes",
        "fast,mean_rows=32,accurate",
        "--tolerance",
        "0.5",
        "--policy",
        str(policy),
        "--json",
        str(numbers),
    ]
    assert main(["sensitivity", str(out), *arguments]) == 0
    assert Policy.load(policy) == Policy("fast,mean_rows=32")
    assert "blocks.2" in capsys.readouterr().out
    results = tmp_path / "bench.json"
    assert main(["bench", "1,200,2,64", "--repeats", "3", "--device", "cpu", "--json", str(results)]) == 0
    data = json.loads(results.read_text())
    assert [(r["name"], len(r["seconds"])) for r in data["results"]] == [("sdpa", 3), ("accurate", 3)]
    assert main(["bench", "--overhead", "--device", "cpu"]) == 0
    assert main(["bench", "1,2,3"]) == 1
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert main(["plot", str(numbers), str(picture)]) == 0 and picture.stat().st_size > 1000
    assert main(["plot", str(results), str(tmp_path / "b.svg")]) == 0
