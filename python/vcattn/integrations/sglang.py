"""SGLang diffusion: "vcattn" as an attention backend, for `--attention-backend vcattn`.

`register()` adds a member to SGLang's enumeration of backends and answers for it where SGLang's platform names the
class of a backend. The class itself is in sglang_backend.py, which SGLang imports by name.
"""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

from ..policy import Policy
from .enums import add_member
from .session import Session

BACKEND = "VCATTN"
_CLASS = "vcattn.integrations.sglang_backend.VCAttnBackend"

# Set by register(), for all layers of the process.
session: Session | None = None
steps_of_requests: int | None = None


def register(
    *,
    policy: Policy | str | Path | None = None,
    num_steps: int | None = None,
    schedule: str | None = "first_quarter",
    platforms: Any = None,
) -> Session:
    """Makes the backend known to SGLang, to be called before its server starts; returns the session of its calls.

    num_steps: denoising steps of a request. SGLang tells the step but not how many there are: without it each call
        makes its own order of the values, and policies that speak of last steps keep SDPA.
    platforms: sglang.multimodal_gen.runtime.platforms, imported if not given.
    """
    global session, steps_of_requests
    platforms = platforms or importlib.import_module("sglang.multimodal_gen.runtime.platforms")
    member = add_member(platforms.AttentionBackendEnum, BACKEND, BACKEND.lower())
    platform = platforms.current_platform
    original = platform.get_attn_backend_cls_str
    if not hasattr(original, "vcattn_original"):

        @functools.wraps(original)
        def get_attn_backend_cls_str(selected_backend: Any, *args: Any, **kwargs: Any) -> str:
            return _CLASS if selected_backend is member else original(selected_backend, *args, **kwargs)

        get_attn_backend_cls_str.vcattn_original = original
        platform.get_attn_backend_cls_str = get_attn_backend_cls_str
    session = Session("vcattn in SGLang", "SDPA", policy=policy, schedule=schedule)
    steps_of_requests = num_steps
    return session


def note_step(step: int | None) -> None:
    """Tells the session the step that a call belongs to, as its metadata has it."""
    if step is None or steps_of_requests is None:
        session.end()
        return
    if session.num_steps is None or (session.step is not None and step < session.step):
        session.begin(steps_of_requests)
    session.set_step(step)
