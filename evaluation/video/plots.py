"""Contact sheet, PSNR by step and relative L2 by layer, as PNG. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from .experiments import GROUPS, REFERENCE, Run
from .report import Measured
from .results import Clip, Store
from .routing import EMULATED

_SHEET_CLIPS = 4
_DPI = 150
_COLOURS = plt.get_cmap("tab20").colors  # as many as there are recipes


def _of_group(measured: Measured, group: str) -> list[Run]:
    return [run for run in GROUPS[group] if run in measured]


def _label(run: Run, measured: Measured) -> str:
    emulated = any(result.engine == EMULATED for result in measured[run].values())
    return f"{run.name} (emulated)" if emulated else run.name


def write_all(folder: Path, store: Store, measured: Measured) -> list[Path]:
    """Writes what there is data for; returns the paths."""
    runs = _of_group(measured, "recipes")
    if not runs:
        return []
    return [
        _contact_sheet(folder, store, measured, runs),
        _by_step(folder, measured, runs),
        _by_layer(folder, measured, runs),
    ]


def _contact_sheet(folder: Path, store: Store, measured: Measured, runs: list[Run]) -> Path:
    """The middle frame of a few clips: BF16 first, then every recipe. Rows are recipes."""
    clips: list[Clip] = [clip for clip in measured[runs[0]] if clip.seed == 0][:_SHEET_CLIPS]
    rows = [REFERENCE, *runs]
    figure, axes = plt.subplots(
        len(rows), len(clips), figsize=(2.7 * len(clips), 1.5 * len(rows)), squeeze=False, layout="constrained"
    )
    for row, run in zip(axes, rows):
        for axis, clip in zip(row, clips):
            path = store.frame_path(run, clip)
            if path.exists():
                axis.imshow(plt.imread(path), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            if run in measured and clip in measured[run]:
                axis.set_xlabel(f"{measured[run][clip].psnr:.1f} dB", fontsize=7)
        row[0].set_ylabel(_label(run, measured) if run in measured else run.name, fontsize=7, wrap=True)
    for axis, clip in zip(axes[0], clips):
        axis.set_title(clip.name, fontsize=8)
    return _save(figure, folder / "contact_sheet.png")


def _by_step(folder: Path, measured: Measured, runs: list[Run]) -> Path:
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    axis.set_prop_cycle(color=_COLOURS)
    for run in runs:
        curves = np.array([result.psnr_by_step for result in measured[run].values()])
        axis.plot(curves.mean(0), label=_label(run, measured))
    axis.set(xlabel="step", ylabel="PSNR of the predicted clip against BF16's, dB")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    axis.grid(alpha=0.3)
    return _save(figure, folder / "psnr_by_step.png")


def _by_layer(folder: Path, measured: Measured, runs: list[Run]) -> Path:
    """Mean over the clips; one panel for each probed step."""
    steps = list(next(iter(measured[runs[0]].values())).relative_l2)
    figure, axes = plt.subplots(
        1, len(steps), figsize=(3.5 * len(steps), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, step in zip(axes[0], steps):
        axis.set_prop_cycle(color=_COLOURS)
        for run in runs:
            errors = np.array([result.relative_l2[step] for result in measured[run].values()])
            axis.semilogy(errors.mean(0), marker=".", label=_label(run, measured))
        axis.set(title=f"step {step}", xlabel="layer")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("relative L2 of attention's output, on equal inputs")
    axes[0][-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return _save(figure, folder / "relative_l2.png")


def _save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DPI)
    plt.close(figure)
    return path
