"""The support matrix of docs/integrations.md is what the calls below do. VCATTN_WRITE_MATRIX=1 writes it anew."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vcattn
from reference import normal

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/integrations.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"
HEADER = "| request | cpu |\n|---|---|\n"


def qkv(dim: int = 64, heads_kv: int = 2, keys: int = 200, dtype: type = np.float32) -> list[np.ndarray]:
    return [
        normal(i, 1, length, heads, dim, dtype=dtype)
        for i, (length, heads) in enumerate(((130, 2), (keys, heads_kv), (keys, heads_kv)))
    ]


def mixed() -> list[np.ndarray]:
    q, k, v = qkv()
    return [q, k.astype(np.float16), v]


def table(rows: int, pairs: int = 32) -> tuple[np.ndarray, np.ndarray]:
    angle = normal(rows, rows, pairs)
    return np.cos(angle), np.sin(angle)


def axes() -> vcattn.Rope:
    return vcattn.Rope(*zip(*(table(rows, pairs) for rows, pairs in ((4, 8), (5, 12), (6, 12)))))


MASK = (np.arange(200) < 150)[None]
REQUESTS: dict[str, Callable[[], Any]] = {
    "float16": lambda: vcattn.attention(*qkv(dtype=np.float16)),
    "float32": lambda: vcattn.attention(*qkv()),
    "float64": lambda: vcattn.attention(*qkv(dtype=np.float64)),
    "mixed dtypes": lambda: vcattn.attention(*mixed()),
    **{
        f"head dimension {dim}": lambda dim=dim: vcattn.attention(*qkv(dim=dim))
        for dim in (32, 40, 64, 80, 96, 128, 192, 256, 512)
    },
    "more keys than queries": lambda: vcattn.attention(*qkv(keys=1000)),
    "one key": lambda: vcattn.attention(*qkv(keys=1)),
    "grouped queries": lambda: vcattn.attention(*qkv(heads_kv=1), enable_gqa=True),
    "key padding mask": lambda: vcattn.attention(*qkv(), key_padding_mask=MASK),
    "packed segments": lambda: vcattn.attention(*qkv(keys=130), cu_seqlens=[0, 0, 30, 130]),
    "packed segments and mask": lambda: vcattn.attention(
        *qkv(), cu_seqlens=([0, 130], [0, 200]), key_padding_mask=MASK
    ),
    "lse": lambda: vcattn.attention(*qkv(), return_lse=True),
    "strided views": lambda: vcattn.attention(*(x[:, ::2, ::-1][:, :, ::-1] for x in qkv())),
    "broadcast views": lambda: vcattn.attention(*(np.broadcast_to(x, (3, *x.shape[1:])) for x in qkv())),
    "rope per token": lambda: vcattn.attention(*qkv(), rope=(vcattn.Rope(*table(130)), vcattn.Rope(*table(200)))),
    "rope per axis, with text": lambda: vcattn.attention(*qkv(), rope=axes(), grid=(2, 4, 5, 6)),
    "rope per axis of packed segments": lambda: vcattn.attention(
        *qkv(), rope=axes(), grid=(2, 4, 5, 6), cu_seqlens=([0, 130], [0, 200])
    ),
    **{f"recipe {name}": lambda name=name: vcattn.attention(*qkv(), recipe=name) for name in vcattn.recipe_names()},
}


def answer(request: Callable[[], Any]) -> str:
    try:
        request()
    except (vcattn.UnsupportedError, vcattn.InvalidArgumentError) as error:
        return f"refused: {error}"
    return "yes"


def matrix() -> str:
    return HEADER + "".join(f"| {name} | {answer(request)} |\n" for name, request in REQUESTS.items())


def test_the_document_is_up_to_date():
    if not DOCUMENT.exists():
        pytest.skip("needs a checkout: docs/integrations.md is not here")
    text, found = DOCUMENT.read_text(), BEGIN + matrix() + END
    if os.environ.get("VCATTN_WRITE_MATRIX"):
        text = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: found, text, flags=re.S)
        DOCUMENT.write_text(text)
    assert found in text, "run the tests with VCATTN_WRITE_MATRIX=1 and look at what has changed"
