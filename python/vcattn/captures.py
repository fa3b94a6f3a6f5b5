"""Captured attention inputs as .safetensors files: what `vcattn capture` writes, and `vcattn compare` and
vcattn.sensitivity read.

A file holds tensors q, k, v in the layout that its metadata gives, and the metadata `layer`, `run`, `step` and
`num_steps` (text, empty where unknown), `branch` (the number of the model's call within the step),
`softmax_scale` and `layout`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from .errors import InvalidArgumentError, UnsupportedError

BSHD, BHSD = "[batch, tokens, heads, head_dim]", "[batch, heads, tokens, head_dim]"


class Capture(NamedTuple):
    """The inputs of one attention call."""

    q: Any  # [batch, seqlen_q, num_heads, head_dim]
    k: Any  # [batch, seqlen_kv, num_heads_kv, head_dim]
    v: Any
    layer: str
    step: int | None = None
    num_steps: int | None = None
    scale: float | None = None
    branch: int = 0
    run: int = 0


def _safetensors(module: str) -> Any:
    try:
        return importlib.import_module(f"safetensors.{module}" if module else "safetensors")
    except ImportError as error:
        raise UnsupportedError(f"captures need safetensors and torch: {error}") from error


def file_name(capture: Capture) -> str:
    """ "blocks.3.attn1_run0_step007_call0.safetensors": sorts by layer, then step."""
    layer = re.sub(r"[^\w.\-]+", "_", capture.layer)
    step = "" if capture.step is None else f"_step{capture.step:03}"
    return f"{layer}_run{capture.run}{step}_call{capture.branch}.safetensors"


def save(capture: Capture, folder: Path) -> Path:
    """Writes one file into `folder` and returns its path. Copies the tensors to host memory."""
    # Memory as it is written: of each its own, dense and with signs resolved.
    tensors = {
        name: getattr(capture, name).detach().cpu().resolve_neg().contiguous().clone() for name in ("q", "k", "v")
    }
    scale = capture.q.shape[-1] ** -0.5 if capture.scale is None else capture.scale
    metadata = {
        "layout": BSHD,
        "softmax_scale": repr(float(scale)),
        "layer": capture.layer,
        "step": "" if capture.step is None else str(capture.step),
        "num_steps": "" if capture.num_steps is None else str(capture.num_steps),
        "branch": str(capture.branch),
        "run": str(capture.run),
    }
    path = folder / file_name(capture)
    _safetensors("torch").save_file(tensors, path, metadata)
    return path


def load(path: str | Path) -> Capture:
    """Reads one file. Raises InvalidArgumentError where it holds no q, k, v or an unknown layout."""
    safetensors = _safetensors("")
    try:
        opened = safetensors.safe_open(path, framework="pt")
    except safetensors.SafetensorError as error:
        raise InvalidArgumentError(f"{path}: not a .safetensors file: {error}") from error
    with opened as file:
        metadata = file.metadata() or {}
        missing = {"q", "k", "v"} - set(file.keys())
        if missing:
            raise InvalidArgumentError(f"{path}: tensors q, k and v; missing {', '.join(sorted(missing))}")
        q, k, v = (file.get_tensor(name) for name in ("q", "k", "v"))
    layout = metadata.get("layout", BSHD)
    batched, unbatched = {BSHD, BHSD}, {text.replace("batch, ", "") for text in (BSHD, BHSD)}
    if layout not in batched | unbatched or q.dim() != (4 if layout in batched else 3):
        raise InvalidArgumentError(f'{path}: layout "{BSHD}" or "{BHSD}"; found "{layout}" and rank {q.dim()}')
    if layout in unbatched:
        q, k, v = q[None], k[None], v[None]
    if layout.endswith("heads, tokens, head_dim]"):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    def number(name: str, kind: type) -> Any:
        text = metadata.get(name, "")
        return kind(text) if text else None

    return Capture(
        q,
        k,
        v,
        layer=metadata.get("layer", Path(path).stem),
        step=number("step", int),
        num_steps=number("num_steps", int),
        scale=number("softmax_scale", float),
        branch=number("branch", int) or 0,
        run=number("run", int) or 0,
    )


def load_all(sources: Iterable[str | Path | Capture]) -> Iterable[Capture]:
    """Captures from files and folders of them, one in memory at a time; captures are passed through."""
    for source in sources:
        if isinstance(source, Capture):
            yield source
            continue
        path = Path(source)
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            yield load(file)
