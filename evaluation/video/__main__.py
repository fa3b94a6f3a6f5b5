"""python -m evaluation.video: renders, measures and reports; see evaluation/README.md."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import time
from pathlib import Path

import torch

from . import metrics, plots, report, runner, weights
from .clips import WINDOWS
from .experiments import GROUPS, runs_of
from .results import Store

# Trained at this grid of tokens: 64 frames of 128 x 256 pixels.
_GRID = (32, 16, 32)
_STEPS = 40
_QUICK_GRID, _QUICK_STEPS = (8, 8, 16), 8
_METRIC_PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 4))  # half a second for each clip


def _part(text: str) -> tuple[int, int]:
    """I/N."""
    index, _, parts = text.partition("/")
    if not (index.isdigit() and parts.isdigit() and int(index) < int(parts)):
        raise argparse.ArgumentTypeError(f"I/N with I from 0 to N - 1; found {text}")
    return int(index), int(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evaluation.video", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--data", help=f"folder of {weights.WEIGHTS} and clips/; else ${weights.DATA_VARIABLE}")
    parser.add_argument("--out", type=Path, default=Path("out/video"), help="results; those already there are kept")
    parser.add_argument(
        "--groups", nargs="+", choices=GROUPS, default=list(GROUPS), metavar="GROUP", help=", ".join(GROUPS)
    )
    parser.add_argument("--windows", type=int, default=len(WINDOWS), help="of the group recipes")
    parser.add_argument("--seeds", type=int, default=2, help="of the group recipes")
    parser.add_argument("--ablation-windows", type=int, default=4, help="of the other groups")
    parser.add_argument("--ablation-seeds", type=int, default=1, help="of the other groups")
    parser.add_argument("--steps", type=int, default=_STEPS, help="Euler steps")
    parser.add_argument("--grid", type=int, nargs=3, default=_GRID, help="tokens: frames, height, width")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--emulate", action="store_true", help="emulate also what a back end serves")
    parser.add_argument("--only", nargs="+", metavar="RUN", help="of the runs of the groups, those of these names")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no clip after this; the next call goes on"
    )
    parser.add_argument(
        "--part",
        type=_part,
        default="0/1",
        metavar="I/N",
        help="renders every N-th window from the I-th on, without a report: for N processes that share --out",
    )
    parser.add_argument("--report-only", action="store_true", help="of the results that are there; renders nothing")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a check in minutes: short clips, few steps, the group recipes on one window",
    )
    args = parser.parse_args()
    if args.quick:
        args.grid, args.steps, args.groups = _QUICK_GRID, _QUICK_STEPS, ["recipes"]
        args.windows = args.seeds = 1
    for name in ("windows", "ablation_windows"):
        if not 1 <= getattr(args, name) <= len(WINDOWS):
            parser.error(f"--{name.replace('_', '-')} is 1 to {len(WINDOWS)}")
    if min(args.seeds, args.ablation_seeds, args.steps, *args.grid) < 1:
        parser.error("--seeds, --ablation-seeds, --steps and --grid are at least 1")
    known = {run.name for run in runs_of(args.groups)}
    if args.only and not known.issuperset(args.only):
        parser.error(
            f"--only: no run {', '.join(sorted(set(args.only) - known))}; there are: {', '.join(sorted(known))}"
        )
    return args


def _command() -> str:
    variables = [f"{name}={os.environ[name]}" for name in (weights.DATA_VARIABLE,) if name in os.environ]
    return shlex.join([*variables, "python", "-m", "evaluation.video", *sys.argv[1:]])


def main() -> int:
    args = _arguments()
    device = torch.device(args.device)
    data = weights.data_folder(args.data)
    try:
        loaded = weights.load(data)
    except (weights.MissingDataError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    store = Store(args.out)
    name = runner.versions(device)["device"]
    if args.report_only:  # perhaps on another machine than the one that measured
        name = (store.any_settings() or {}).get("device", name)
    settings = runner.Settings(args.steps, tuple(args.grid), loaded.sha256, name, args.emulate)
    ablation = (args.ablation_windows, args.ablation_seeds)
    counts = {group: (args.windows, args.seeds) if group == "recipes" else ablation for group in args.groups}
    groups = {
        group: tuple(run for run in GROUPS[group] if not args.only or run.name in args.only) for group in args.groups
    }
    work = runner.plan(groups, counts, list(WINDOWS))
    lpips, no_lpips = metrics.load_lpips(device)
    if not args.report_only:
        model = weights.build(loaded, device)
        renderer = runner.Runner(model, settings, data, store, lpips, processes=_METRIC_PROCESSES)
        begin = time.perf_counter()
        first, parts = args.part
        mine = {window.name: window for window in WINDOWS[first::parts]}
        try:
            rendered, left = renderer.run(
                {clip: runs for clip, runs in work.items() if clip.window in mine}, mine, 60 * args.minutes
            )
        except (weights.MissingDataError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{rendered} clips rendered in {time.perf_counter() - begin:.0f} s, {left} left; the others were there")
        if parts > 1:
            return 0
    measured = report.collect(store, work, settings)
    notes = {"lpips": no_lpips} if no_lpips else {}
    print(report.write(args.out, args.groups, measured, command=_command(), notes=notes))
    for path in plots.write_all(args.out, store, measured):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
