"""The weights of the model, from a .safetensors file with int8 rows."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .model import ModelSize, VideoTransformer

DATA_VARIABLE = "VCATTN_EVALUATION_DATA"  # a folder with WEIGHTS and clips/
WEIGHTS = "vdit.safetensors"
DEFAULT_DATA = Path(__file__).parent.parent / "data"

_DTYPES = {"F32": np.float32, "I8": np.int8}
# Names in the file, part by part, to those of model.py.
_PARTS = {
    "inp": "patches",
    "txt": "label_text",
    "txp": "text",
    "t1": "time.0",
    "t2": "time.2",
    "t6": "modulation",
    "bl": "blocks",
    "fin": "final_modulation",
    "out": "pixels",
    "mod": "own_modulation",
    "qkv": "qkv",
    "o": "projection",
    "qn": "query_norm",
    "kn": "key_norm",
    "f1": "mlp.0",
    "f2": "mlp.2",
    "w": "weight",
}


class MissingDataError(FileNotFoundError):
    """The weights or a clip are not there; says what, where it was looked for and how to name another place."""


class Weights(NamedTuple):
    size: ModelSize
    tensors: dict[str, Tensor]  # float32, by the names of VideoTransformer's parameters
    sha256: str  # of the file


def data_folder(named: str | None = None) -> Path:
    """The folder of weights and clips: `named`, else the environment variable, else evaluation/data."""
    return Path(named or os.environ.get(DATA_VARIABLE) or DEFAULT_DATA)


def require(path: Path, what: str) -> Path:
    """`path`, or MissingDataError."""
    if not path.exists():
        raise MissingDataError(
            f"{what}: no file {path}. It belongs to the project's data (evaluation/data/README.md says which files and "
            f"where they come from); name its folder with --data or {DATA_VARIABLE}."
        )
    return path


def load(folder: Path) -> Weights:
    """Reads the file; raises MissingDataError, or ValueError where it is not such a file."""
    raw = require(folder / WEIGHTS, "the weights of the video model").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if length > len(raw) - 8:
        raise ValueError(f"{folder / WEIGHTS} is not a safetensors file, or was cut short")
    header, data = json.loads(raw[8 : 8 + length]), memoryview(raw)[8 + length :]
    metadata = header.pop("__metadata__")
    arrays = {name: _array(entry, data) for name, entry in header.items()}
    tensors = {}
    for name, array in arrays.items():
        if name.endswith(".scale"):
            continue
        if name.endswith(".q"):  # int8 rows times a scale for each
            name = name[: -len(".q")]
            array = array.astype(np.float32) * arrays[f"{name}.scale"][:, None]
        tensors[".".join(_PARTS.get(part, part) for part in name.split("."))] = torch.from_numpy(array.copy())
    size = ModelSize(
        width=int(metadata["dim"]),
        heads=int(metadata["heads"]),
        depth=int(metadata["depth"]),
        patch=tuple(int(extent) for extent in metadata["patch"].split(",")),
        text_tokens=int(metadata["text_tokens"]),
        labels=int(metadata["clips"]),
    )
    return Weights(size, tensors, hashlib.sha256(raw).hexdigest())


def _array(entry: dict, data: memoryview) -> np.ndarray:
    begin, end = entry["data_offsets"]
    return np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])


def build(weights: Weights, device: torch.device) -> VideoTransformer:
    """The model with these weights, ready to render."""
    model = VideoTransformer(weights.size)
    model.load_state_dict(weights.tensors)
    return model.eval().requires_grad_(False).to(device)
