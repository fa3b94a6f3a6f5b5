"""python -m evaluation.clip_time: seconds of a clip, BF16 attention beside vcattn; needs a CUDA card."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import vcattn

from . import hunyuan, wan
from .timing import AttentionTimer, Forward

_MODELS = {"wan2.2-a14b": wan, "hunyuanvideo-1.5": hunyuan}
_STEPS = 40
_BRANCHES = 2  # CFG: the denoiser runs twice a step
_BASELINE = "cuDNN BF16"
_RECIPES = ("accurate", "fast")
_QUICK_LAYERS = 4
# (what the table says, kind, reuse) of vcattn.Schedule.
_OTHER_SCHEDULES = (
    ("every step, an order for four", "every_step", 4),
    ("every step, an order for each", "every_step", 1),
    ("never", "never", 0),
)


def step_kinds(schedule: vcattn.Schedule) -> dict[tuple[bool, bool, bool], list[int]]:
    """Steps of equal cost: by whether they smooth, regroup, and start from the last grouping."""
    kinds: dict[tuple[bool, bool, bool], list[int]] = {}
    for step in range(schedule.num_steps):
        todo = schedule.at(step)
        kinds.setdefault((todo.smooth, todo.regroup, todo.warm), []).append(step)
    return kinds


def _measured_branches(kind: tuple[bool, bool, bool]) -> int:
    """Branches cost the same. Both run where each makes its first order, since both orders take memory, and at the
    commonest kind of step, for a second sample."""
    smooth, regroup, warm = kind
    return _BRANCHES if not smooth or (regroup and not warm) else 1


def clip_seconds(by_kind: list[tuple[int, float]]) -> float:
    """Of a clip with CFG: (steps of a kind, seconds of a forward at such a step). Text encoder and VAE not counted."""
    return sum(steps * seconds for steps, seconds in by_kind) * _BRANCHES


@contextmanager
def first_layer_alone(model: Any) -> Iterator[None]:
    """For warming up: all layers are alike, and a forward of all of them takes seconds."""
    name = next(module.LAYERS for module in _MODELS.values() if hasattr(model, module.LAYERS))
    layers = getattr(model, name)
    setattr(model, name, layers[:1])
    try:
        yield
    finally:
        setattr(model, name, layers)


def measure_baseline(
    model: Any, inputs: dict[str, torch.Tensor], timer: AttentionTimer, repeats: int, backend: str
) -> dict[str, Any]:
    """One of diffusers' own backends: all steps cost the same."""
    model.set_attention_backend(backend)
    with timer.installed(), torch.no_grad():
        with first_layer_alone(model):
            timer.time(lambda: model(**inputs))  # compiles and allocates
        times = [timer.time(lambda: model(**inputs)) for _ in range(repeats)]
    return {"step_kinds": [{"steps": _STEPS, "example": 0, **_summary(times)}]}


def measure_recipe(
    model: Any,
    inputs: dict[str, torch.Tensor],
    timer: AttentionTimer,
    policy: str | vcattn.Policy,
    kind: str,
    repeats: int,
) -> dict[str, Any]:
    """Through the diffusers adapter, with its states and schedule: one step of each kind."""
    from vcattn.integrations import diffusers

    schedule = vcattn.Schedule(_STEPS, kind)
    kinds = step_kinds(schedule)
    attached = diffusers.attach(model, policy=policy, schedule=kind)
    try:
        with timer.installed(), torch.no_grad():
            times: dict[tuple[bool, bool, bool], list[Forward]] = {key: [] for key in kinds}

            def request(kept: bool) -> None:
                attached.session.begin(_STEPS)
                for key, steps in sorted(kinds.items(), key=lambda item: item[1][0]):
                    attached.next_step()  # counts the branches from the first again
                    attached.session.set_step(steps[0])
                    for _ in range(_measured_branches(key)):
                        forward = timer.time(lambda: model(**inputs))
                        if kept:
                            times[key].append(forward)

            with first_layer_alone(model):
                request(kept=False)  # compiles and allocates
            for _ in range(repeats):
                request(kept=True)
        report = attached.report
        served, fallbacks = report.served, dict(report.fallbacks)
    finally:
        attached.detach()
    rows = [
        {
            "steps": len(steps),
            "example": steps[0],
            "smooth": key[0],
            "regroup": key[1],
            "warm": key[2],
            **_summary(times[key]),
        }
        for key, steps in kinds.items()
    ]
    return {"schedule": kind, "step_kinds": rows, "served": served, "fallbacks": fallbacks}


def _summary(times: list[Forward]) -> dict[str, Any]:
    return {
        "seconds": median(f.total for f in times),
        "self_attention_seconds": median(f.self_attention for f in times),
        "cross_attention_seconds": median(f.cross_attention for f in times),
        "samples": [f._asdict() for f in times],
    }


def finish(result: dict[str, Any]) -> dict[str, Any]:
    """Adds what follows from the step kinds: the clip, the mean forward and attention's share of it."""
    kinds = result["step_kinds"]
    steps = sum(row["steps"] for row in kinds)
    clip = clip_seconds([(row["steps"], row["seconds"]) for row in kinds])
    attention = clip_seconds([(row["steps"], row["self_attention_seconds"]) for row in kinds])
    return {
        **result,
        "clip_seconds": clip,
        "forward_seconds": clip / steps / _BRANCHES,
        "self_attention_share": attention / clip,
        "self_attention_seconds": attention / steps / _BRANCHES,
    }


def schedule_table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown: clips under other schedules, put together from the same kinds of steps, over the one measured."""
    lines = ["| shape | attention | schedule | s per clip | over the schedule measured |", "|---|---|---|---|---|"]
    for shape, rows in results.items():
        for name, row in rows.items():
            seconds = {_kind(entry): entry["seconds"] for entry in row["step_kinds"] if "warm" in entry}
            for schedule, kind, reuse in _OTHER_SCHEDULES:
                kinds = step_kinds(vcattn.Schedule(_STEPS, kind, reuse))
                if seconds.keys() >= kinds.keys():
                    clip = clip_seconds([(len(steps), seconds[key]) for key, steps in kinds.items()])
                    over = clip / row["clip_seconds"] - 1
                    lines.append(f"| {shape} | {name} | {schedule} | {clip:.1f} | {over:+.1%} |")
    return "\n".join(lines)


def _kind(row: dict[str, Any]) -> tuple[bool, bool, bool]:
    return row["smooth"], row["regroup"], row["warm"]


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Markdown. `predicted`: the baseline's forward with its self-attention replaced by the recipe's."""
    lines = [
        "| shape | attention | s per forward | self-attention | speed-up | predicted | peak memory, GiB | s per clip |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for shape, rows in results.items():
        base = rows[_BASELINE]
        for name, row in rows.items():
            rest = base["forward_seconds"] - base["self_attention_seconds"]
            predicted = base["forward_seconds"] / (rest + row["self_attention_seconds"])
            lines.append(
                f"| {shape} | {name} | {row['forward_seconds']:.3f} | {row['self_attention_share']:.0%} "
                f"| {base['forward_seconds'] / row['forward_seconds']:.2f} | {predicted:.2f} "
                f"| {row['peak_memory_bytes'] / 2**30:.1f} | {row['clip_seconds']:.0f} |"
            )
    return "\n".join(lines)


def measure_shape(
    model: Any,
    inputs: dict[str, torch.Tensor],
    policies: dict[str, str | vcattn.Policy],
    schedule: str,
    repeats: int,
    baseline: str = "_native_cudnn",
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of the table with their names, as they are measured: the baseline (a backend of diffusers), the policies."""
    device = inputs["hidden_states"].device
    timer = AttentionTimer(device, model)
    for name in (_BASELINE, *policies):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        if name == _BASELINE:
            row = measure_baseline(model, inputs, timer, repeats + 1, baseline)
        else:
            row = measure_recipe(model, inputs, timer, policies[name], schedule, repeats)
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        yield name, {**finish(row), "peak_memory_bytes": peak}


def write(folder: Path, facts: dict[str, Any], results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """clip_time.json and clip_time.md under `folder`; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "clip_time.json").write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "command")
    text = "\n".join([f"`{facts['command']}`", "", about, "", table(results), "", schedule_table(results), ""])
    (folder / "clip_time.md").write_text(text)
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evaluation.clip_time", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--model", choices=_MODELS, default="wan2.2-a14b")
    parser.add_argument("--shapes", nargs="+", choices=wan.SHAPES, default=list(wan.SHAPES))
    parser.add_argument("--recipes", nargs="+", default=list(_RECIPES), metavar="RECIPE")
    parser.add_argument("--schedule", default="first_quarter", help="first_quarter has every kind of step")
    parser.add_argument("--repeats", type=int, default=1, help="of a forward at each kind of step")
    parser.add_argument("--out", type=Path, default=Path("out/clip_time"))
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_LAYERS} layers at 480p: does everything run?")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    if not torch.cuda.is_available():
        print(
            "evaluation.clip_time needs a CUDA card with about 60 GB of memory: torch sees none here", file=sys.stderr
        )
        return 1
    device = torch.device("cuda")
    denoiser = _MODELS[args.model]
    config = dict(denoiser.CONFIG)
    if args.quick:
        config["num_layers"], args.shapes, args.repeats = _QUICK_LAYERS, ["480p"], 1
    model = denoiser.build(config, device)
    facts = {
        "command": shlex.join(["python", "-m", "evaluation.clip_time", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name(device),
        "vcattn": vcattn.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "model": args.model,
        "layers": config["num_layers"],
    }
    policies: dict[str, str | vcattn.Policy] = {recipe: recipe for recipe in args.recipes}
    results: dict[str, dict[str, dict[str, Any]]] = {}
    text = ""
    for shape in args.shapes:
        inputs = denoiser.inputs(config, denoiser.SHAPES[shape], device)
        for name, row in measure_shape(model, inputs, policies, args.schedule, args.repeats):
            calls = f", served {row['served']}, fallbacks {row['fallbacks']}" if "served" in row else ""
            print(f"{shape}  {name}: {row['forward_seconds']:.3f} s per forward{calls}", flush=True)
            results.setdefault(shape, {})[name] = row
            text = write(args.out, facts, results)  # each row is kept, whatever becomes of the next
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
