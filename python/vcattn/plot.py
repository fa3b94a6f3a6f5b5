"""`python -m vcattn plot`: pictures of what bench and sensitivity wrote as JSON."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from typing import Any

from .errors import InvalidArgumentError, UnsupportedError


def plot(source: str | Path, picture: str | Path) -> None:
    """Draws a JSON file of `bench --json` or `sensitivity --json` into `picture` (.png, .svg, .pdf).

    Raises UnsupportedError without matplotlib, InvalidArgumentError for another file.
    """
    try:
        data = json.loads(Path(source).read_text())
        kind = data["kind"]
        draw = {"bench": _draw_bench, "sensitivity": _draw_sensitivity}[kind]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{source}: JSON of `vcattn bench` or `vcattn sensitivity`: {error}") from error
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError("plot needs matplotlib: pip install matplotlib") from error
    figure = figures.Figure(figsize=(9, 5), layout="constrained")
    try:
        draw(figure.add_subplot(), data)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidArgumentError(f"{source}: {kind} without what is drawn: {error!r}") from error
    figure.savefig(picture, dpi=120)


def _draw_bench(axes: Any, data: dict[str, Any]) -> None:
    """Median time of each recipe by shape, with the range of the samples."""
    shapes = list(dict.fromkeys(",".join(map(str, r["shape"])) for r in data["results"]))
    names = list(dict.fromkeys(r["name"] for r in data["results"]))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        by_shape = {",".join(map(str, r["shape"])): r["seconds"] for r in data["results"] if r["name"] == name}
        medians = [1e3 * statistics.median(by_shape[shape]) for shape in shapes]
        below = [m - 1e3 * min(by_shape[shape]) for m, shape in zip(medians, shapes)]
        above = [1e3 * max(by_shape[shape]) - m for m, shape in zip(medians, shapes)]
        places = [s + (i - (len(names) - 1) / 2) * width for s in range(len(shapes))]
        axes.bar(places, medians, width, yerr=[below, above], capsize=2, label=name)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.set_xlabel("batch, tokens, heads, head dimension")
    axes.set_ylabel("median time of a call, ms (range of the samples)")
    axes.set_title(f"Attention, {data['dtype']} on {data['device']}")
    axes.legend()


def _draw_sensitivity(axes: Any, data: dict[str, Any]) -> None:
    """Error of each recipe by layer; one point a captured call."""
    layers = list(dict.fromkeys(call["layer"] for call in data["calls"]))
    for i, recipe in enumerate(data["recipes"]):
        places = [layers.index(call["layer"]) + 0.15 * (i - (len(data["recipes"]) - 1) / 2) for call in data["calls"]]
        axes.plot(places, [call["errors"][recipe] for call in data["calls"]], "o", label=recipe)
    axes.set_yscale("log")
    axes.set_xticks(range(len(layers)), layers, rotation=45, ha="right")
    axes.set_ylabel("||out - fp32|| / ||fp32||")
    axes.set_title("Error of captured calls by layer")
    axes.legend()
