"""SGLang diffusion: "vcattn" as an attention backend, for `--attention-backend vcattn`.

`register()` adds a member to SGLang's enumeration of backends and answers for it where SGLang's platform names the
class of a backend. The class itself is in sglang_backend.py, which SGLang imports by name. SGLang's workers are
processes of their own, in each of which it calls the plugins of installed packages: `plugin` is ours.
"""

from __future__ import annotations

import functools
import importlib
import os
import weakref
from pathlib import Path
from typing import Any

from ..policy import Policy
from ..schedule import DEFAULT_KIND
from .enums import add_member
from .session import Session

BACKEND = "VCATTN"
POLICY_VARIABLE = "VCATTN_POLICY"
_CLASS = "vcattn.integrations.sglang_backend.VCAttnBackend"

# Set by register(), for all layers of the process.
session: Session | None = None
# The request that the session's states belong to. Not kept alive by it: it holds the latents.
_request: weakref.ref[Any] | None = None


def plugin() -> None:
    """What SGLang calls in each of its processes, by the entry point in the group "sglang.multimodal_gen.plugins".

    The environment variable VCATTN_POLICY names the policy: a .json file or a recipe.
    """
    if session is None:
        register(policy=os.environ.get(POLICY_VARIABLE))


def register(
    *,
    policy: Policy | str | Path | None = None,
    schedule: str | None = DEFAULT_KIND,
    platforms: Any = None,
) -> Session:
    """Makes the backend known to SGLang in this process, before its layers are made; returns the session of its calls.

    platforms: sglang.multimodal_gen.runtime.platforms, imported if not given.
    """
    global session, _request
    made = Session("vcattn in SGLang", "SDPA", policy=policy, schedule=schedule)  # raises before anything is changed
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
    session, _request = made, None
    return session


def note_step(request: Any, step: Any) -> None:
    """Tells the session the request and the step that a call belongs to, as SGLang's forward context has them: the
    batch of the request, None outside of denoising, and the index of the step."""
    global _request
    num_steps = getattr(request, "num_inference_steps", None)
    if not isinstance(step, int) or not isinstance(num_steps, int):
        session.set_step(-1)
        return
    if _request is None or _request() is not request or num_steps != session.num_steps:
        _request = weakref.ref(request)
        session.begin(num_steps)
    session.set_step(step)
