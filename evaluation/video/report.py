"""Tables (Markdown and JSON), from the results of the runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from .experiments import CLAIMS, FIRST, GROUPS, Run
from .metrics import Estimate, estimate
from .results import Clip, Result, Store

Measured = dict[Run, dict[Clip, Result]]


@dataclass(frozen=True)
class Row:
    """One run over the clips that all runs of its group have."""

    run: Run
    engine: str
    clips: int
    psnr: Estimate
    ssim: Estimate
    lpips: Estimate | None
    relative_l2: float  # mean over layers, probed steps and clips
    seconds: float  # median


def collect(store: Store, work: dict[Clip, list[Run]], settings: Any) -> Measured:
    """Every finished result of `work` under these settings."""
    measured: Measured = {}
    for clip, runs in work.items():
        for run in runs:
            result = store.load(run, clip, settings.of(run))
            if result is not None:
                measured.setdefault(run, {})[clip] = result
    return measured


def facts(measured: Measured) -> dict[str, Any]:
    """What the results were measured on, with which versions, tokens and steps."""
    results = [result for clips in measured.values() for result in clips.values()]
    found: dict[str, Any] = {}
    for name in sorted({name for result in results for name in result.versions}):
        found[name] = " and ".join(sorted({result.versions[name] for result in results if name in result.versions}))
    if results:
        settings = results[0].settings
        found |= {"grid": " x ".join(map(str, settings["grid"])), "steps": settings["num_steps"]}
    return found


def group_rows(runs: tuple[Run, ...], measured: Measured) -> list[Row]:
    """Rows over the clips that all runs have which have any."""
    runs = tuple(run for run in runs if run in measured)
    if not runs:
        return []
    common = set.intersection(*(set(measured[run]) for run in runs))
    shared = sorted(common, key=lambda clip: clip.name)
    return [_row(run, [measured[run][clip] for clip in shared], shared) for run in runs] if shared else []


def _row(run: Run, results: list[Result], shared: list[Clip]) -> Row:
    windows = [clip.window for clip in shared]
    lpips = [result.lpips for result in results]
    engines = sorted({result.engine for result in results})
    return Row(
        run=run,
        engine=" and ".join(engines),
        clips=len(shared),
        psnr=estimate([result.psnr for result in results], windows),
        ssim=estimate([result.ssim for result in results], windows),
        lpips=None if None in lpips else estimate(lpips, windows),
        relative_l2=fmean(error for result in results for layers in result.relative_l2.values() for error in layers),
        seconds=median(result.seconds for result in results),
    )


def claims(measured: Measured) -> list[dict[str, Any]]:
    """By how much PSNR of one recipe exceeds another's on the same clips, beside what it should."""
    by_name = {run.name: clips for run, clips in measured.items()}
    found = []
    for better, worse, wanted in CLAIMS:
        shared = sorted(set(by_name.get(better, ())) & set(by_name.get(worse, ())), key=lambda clip: clip.name)
        if len({clip.window for clip in shared}) < 2:
            continue  # no interval
        differences = [by_name[better][clip].psnr - by_name[worse][clip].psnr for clip in shared]
        found.append(
            {
                "better": better,
                "worse": worse,
                "wanted_db": wanted,
                "difference_db": estimate(differences, [clip.window for clip in shared]),
                "clips": len(shared),
            }
        )
    return found


def write(folder: Path, groups: list[str], measured: Measured, *, command: str, notes: dict[str, str]) -> str:
    """Writes results.json and results.md of these groups under `folder`; returns the Markdown."""
    tables = {group: rows for group in groups if (rows := group_rows(GROUPS[group], measured))}
    if "recipes" in tables:  # those rendered first may have more clips than all have
        first = group_rows(tuple(run for run in GROUPS["recipes"] if run.name in FIRST), measured)
        if first and first[0].clips > tables["recipes"][0].clips:
            tables = {"recipes that were rendered first": first, **tables}
    found = claims(measured)
    about = {**facts(measured), **notes}
    document = {
        "command": command,
        **about,
        "groups": {group: [_as_json(row) for row in rows] for group, rows in tables.items()},
        "claims": [{**claim, "difference_db": claim["difference_db"]._asdict()} for claim in found],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [f"`{command}`", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for group, rows in tables.items():
        lines += [f"### {group}", "", *_table(rows), ""]
    if found:
        lines += ["### Differences in PSNR on the same clips", "", *_claim_table(found), ""]
    text = "\n".join(lines)
    (folder / "results.md").write_text(text)
    return text


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "run": row.run.name,
        "recipe": row.run.recipe,
        "schedule": row.run.schedule,
        "reuse": row.run.reuse,
        "engine": row.engine,
        "clips": row.clips,
        "psnr_db": row.psnr._asdict(),
        "ssim": row.ssim._asdict(),
        "lpips": None if row.lpips is None else row.lpips._asdict(),
        "relative_l2": row.relative_l2,
        "seconds": row.seconds,
    }


def _table(rows: list[Row]) -> list[str]:
    lines = [
        "| run | engine | clips | PSNR, dB [95 %] | SSIM [95 %] | LPIPS [95 %] | relative L2 of a call | s per clip |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ssim = f"{row.ssim.mean:.4f} [{row.ssim.low:.4f}, {row.ssim.high:.4f}]"
        lpips = "-" if row.lpips is None else f"{row.lpips.mean:.4f} [{row.lpips.low:.4f}, {row.lpips.high:.4f}]"
        cells = [f"`{row.run.name}`", row.engine, row.clips, row.psnr, ssim, lpips]
        lines.append("| " + " | ".join([*map(str, cells), f"{row.relative_l2:.5f}", f"{row.seconds:.2f}"]) + " |")
    return lines


def _claim_table(found: list[dict[str, Any]]) -> list[str]:
    lines = ["| | difference, dB [95 %] | at least | clips | |", "|---|---|---|---|---|"]
    for claim in found:
        met = "met" if claim["difference_db"].mean >= claim["wanted_db"] else "not met"
        lines.append(
            f"| `{claim['better']}` above `{claim['worse']}` | {claim['difference_db']} | {claim['wanted_db']} "
            f"| {claim['clips']} | {met} |"
        )
    return lines
