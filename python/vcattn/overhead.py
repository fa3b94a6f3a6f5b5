"""How long the Python layer takes, without the library: for `python -m vcattn bench --overhead` and the tests."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

from . import _library
from .attention import attention
from .recipe import AUTO, as_recipe


def layer_seconds(q: Any, k: Any, v: Any, *, calls: int = 200, repeats: int = 25, **options: Any) -> float:
    """Seconds of one vcattn.attention call on these arrays with the library's two functions replaced by ones that
    return at once: the least of `repeats` means over `calls` calls, as what else runs only adds."""
    as_recipe(options.get("recipe", AUTO))  # what a first call looks up
    nothing = lambda *arguments: 0  # noqa: E731
    idle = SimpleNamespace(vcattn_attention=nothing, vcattn_attention_workspace_size=nothing)
    best = float("inf")
    with mock.patch.object(_library, "_library", idle):
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                attention(q, k, v, **options)
            best = min(best, (time.perf_counter() - start) / calls)
    return best
