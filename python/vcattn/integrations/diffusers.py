"""diffusers: an attention backend named "vcattn", and `attach`, which gives it layers, steps, branches and experts.

diffusers tells a backend nothing of where a call comes from. `attach` learns it by hooks: before each attention module
(the layer), before each denoiser (expert and CFG branch), and around the scheduler's set_timesteps and step (the
request and its steps). It needs no change of the pipeline.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models import attention_dispatch
from diffusers.models.modeling_utils import ModelMixin

from .. import torch_intercept
from ..errors import InvalidArgumentError, UnsupportedError
from ..policy import Policy
from ..report import Report
from ..schedule import DEFAULT_KIND
from .enums import add_member
from .session import Session

BACKEND = "vcattn"
_Names = attention_dispatch.AttentionBackendName
_Registry = attention_dispatch._AttentionBackendRegistry
_DENOISERS = ("transformer", "transformer_2", "unet")  # of pipelines; Wan2.2 has two experts
# Processors whose mask, [batch, 1, tokens, tokens], admits a pair where both tokens are admitted. Its diagonal is the
# mask of keys, and rows of tokens that are not admitted are never read.
_PAIRWISE_MASKS = ("HunyuanVideo15AttnProcessor2_0",)
# Processors that join text to the module's hidden states, the video: in front of it or behind it.
_TEXT_FIRST = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
_TEXT_LAST = ("HunyuanVideoAttnProcessor2_0", "HunyuanVideo15AttnProcessor2_0")


class _Place(threading.local):
    """Where this thread is inside an attached model."""

    session: Session | None = None
    branch: int = 0  # number of the denoiser's call within the step: the CFG branch where those are separate calls
    layer: str | None = None  # its path, after the expert's name if that is not the first
    pairwise_mask: bool = False
    video_tokens: int = 0  # of the layer's call; 0: not known
    text_first: bool = False

    def video(self, num_keys: int) -> tuple[int, int] | None:
        """The video among the keys of a call, as Session.attend takes it."""
        text = num_keys - self.video_tokens
        if self.video_tokens == 0 or text <= 0:
            return None
        return (text if self.text_first else 0), self.video_tokens


_place = _Place()


def register() -> Any:
    """Adds the backend to diffusers, once, and returns its member of AttentionBackendName.

    `model.set_attention_backend("vcattn")` and `attention_backend("vcattn")` then work by themselves, with the default
    policy, and without what only `attach` knows: layers, steps and orders kept between steps.
    """
    member = add_member(_Names, BACKEND.upper(), BACKEND)
    if member not in _Registry._backends:
        _Registry.register(member, constraints=[], supports_context_parallel=False)(_backend)
    return member


_unattached = Session("vcattn in diffusers", "the native backend", policy=None, schedule=None)


def _backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """[batch, seqlen, num_heads, head_dim], as every backend of diffusers. Every argument that diffusers passes is
    named here: it drops those that are not, without a word at its default settings."""
    if _parallel_config is not None:
        raise UnsupportedError("vcattn does not support diffusers' context parallelism: set another attention backend")
    session = _place.session if _place.session is not None else _unattached

    def native() -> Any:
        layer, _place.layer = _place.layer, None  # so that _DirectCalls passes on what the native backend calls
        try:
            return _Registry._backends[_Names.NATIVE](
                query=query,
                key=key,
                value=value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                return_lse=return_lse,
            )
        finally:
            _place.layer = layer

    mask = attn_mask
    if mask is not None:
        if mask.ndim == 2 and mask.shape == (query.shape[0], key.shape[1]):
            mask = mask[:, None, None]  # as the native backend reads it
        elif _place.pairwise_mask and mask.ndim == 4 and mask.shape[-1] == mask.shape[-2]:
            mask = mask.diagonal(dim1=-2, dim2=-1)[:, :, None]
    return session.attend(
        query,
        key,
        value,
        native,
        layer=_place.layer,
        stream=None if _place.layer is None else (_place.layer, _place.branch),
        video=_place.video(key.shape[1]),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
    )


class attach:  # noqa: N801  (reads as a function: `with attach(pipe): ...`)
    """Sends the attention of a pipeline, or of one model, to vcattn until `detach` or the end of the `with` block.

    >>> with vcattn.integrations.diffusers.attach(pipe, policy="accurate") as report:
    ...     video = pipe(prompt).frames
    >>> print(report)

    target: a DiffusionPipeline, whose denoisers and scheduler are hooked; or a model, for which `session.begin` and
        `session.set_step` tell the steps (without them each call makes its own order).
    policy: a Policy, a .json file of one, a recipe, or None: `auto` everywhere, the native backend for short calls.
    schedule: kind of vcattn.Schedule; None: every call makes its own order.

    Layers are named by their paths inside a denoiser ("blocks.3.attn1"), those of a second expert with its name before
    ("transformer_2.blocks.3.attn1"). Models whose processors call scaled_dot_product_attention themselves (CogVideoX)
    are served too. In code under torch.compile calls are served without layers, steps and counts.
    Raises InvalidArgumentError where there is nothing to attach to, UnsupportedError under context parallelism.
    """

    def __init__(
        self,
        target: DiffusionPipeline | ModelMixin,
        *,
        policy: Policy | str | Path | None = None,
        schedule: str | None = DEFAULT_KIND,
    ) -> None:
        member = register()
        self.session = Session("vcattn in diffusers", "the native backend", policy=policy, schedule=schedule)
        self._undo: list[Callable[[], None]] = []
        self._calls: dict[str, int] = {}  # of each expert within the step
        for expert, model in _denoisers(target).items():
            self._attach_model(expert, model, member)
        scheduler = getattr(target, "scheduler", None)
        if scheduler is not None:
            self._attach_scheduler(scheduler)

    @property
    def report(self) -> Report:
        """What became of the calls."""
        return self.session.report

    def __enter__(self) -> Report:
        return self.report

    def __exit__(self, *exception: Any) -> None:
        self.detach()

    def detach(self) -> None:
        """Puts back everything that was changed."""
        while self._undo:
            self._undo.pop()()
        self.session.end()

    def next_step(self) -> None:
        """The next step of the request starts: what the scheduler's step does for pipelines."""
        self._calls.clear()
        if self.session.step is not None:
            self.session.set_step(self.session.step + 1)

    def _attach_model(self, expert: str, model: ModelMixin, member: Any) -> None:
        prefix = "" if expert in ("", _DENOISERS[0]) else f"{expert}."
        for name, module in model.named_modules():
            processor = getattr(module, "processor", None)
            if processor is None or isinstance(processor, torch.nn.Module):
                continue
            if getattr(processor, "_parallel_config", None) is not None:
                self.detach()
                raise UnsupportedError("vcattn does not support diffusers' context parallelism")
            if hasattr(processor, "_attention_backend"):
                self._set_backend(processor, member)
            self._hook_layer(module, prefix + name, type(processor).__name__)
        self._hook_denoiser(model, expert)

    def _set_backend(self, processor: Any, member: Any) -> None:
        own, before = "_attention_backend" in vars(processor), processor._attention_backend

        def undo() -> None:
            if own:
                processor._attention_backend = before
            else:
                del processor._attention_backend

        processor._attention_backend = member
        self._undo.append(undo)

    def _hook_layer(self, module: torch.nn.Module, name: str, processor: str) -> None:
        pairwise, joins_text = processor in _PAIRWISE_MASKS, processor in _TEXT_FIRST + _TEXT_LAST

        def enter(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                _place.layer, _place.pairwise_mask = name, pairwise
                if joins_text:
                    _place.video_tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
                    _place.text_first = processor in _TEXT_FIRST

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not torch.compiler.is_compiling():
                _place.layer, _place.pairwise_mask, _place.video_tokens = None, False, 0

        self._undo.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(leave, always_call=True).remove)

    def _hook_denoiser(self, model: ModelMixin, expert: str) -> None:
        interceptor = _DirectCalls(self.report)

        # Not to be traced where the whole model is compiled: they change what this thread's later calls go by.
        @torch.compiler.disable
        def enter(module: torch.nn.Module, args: Any) -> None:
            _place.session = self.session
            _place.branch = self._calls.get(expert, 0)
            self._calls[expert] = _place.branch + 1
            torch_intercept.push(interceptor, interceptor)

        @torch.compiler.disable
        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            torch_intercept.pop(interceptor)
            _place.session = None

        self._undo.append(model.register_forward_pre_hook(enter).remove)
        self._undo.append(model.register_forward_hook(leave, always_call=True).remove)

    def _attach_scheduler(self, scheduler: Any) -> None:
        set_timesteps, step = scheduler.set_timesteps, scheduler.step

        @functools.wraps(set_timesteps)
        def counted_set_timesteps(*args: Any, **kwargs: Any) -> Any:
            result = set_timesteps(*args, **kwargs)
            self._calls.clear()
            self.session.begin(len(scheduler.timesteps))
            return result

        @functools.wraps(step)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.next_step()
            return result

        def undo() -> None:
            for name in ("set_timesteps", "step"):
                vars(scheduler).pop(name, None)

        scheduler.set_timesteps, scheduler.step = counted_set_timesteps, counted_step
        self._undo.append(undo)


class _DirectCalls:
    """Calls of scaled_dot_product_attention from inside an attention module whose processor does not ask diffusers for
    a backend. What the native backend calls in turn has no layer any more and passes through."""

    min_seqlen = -1  # the session's policy decides

    def __init__(self, report: Report) -> None:
        self.report = report

    def call(self, original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        # Compiled code has no layers; there a call of the native backend is looked at twice, with the same answer.
        if _place.session is None or (_place.layer is None and not torch.compiler.is_compiling()):
            return original(*args, **kwargs)
        return self._attend(original, *args, **kwargs)

    def _attend(
        self,
        original: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        def native() -> torch.Tensor:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        if query.dim() != 4:
            return native()
        return _place.session.attend(
            query,
            key,
            value,
            native,
            layout="BHSD",
            layer=_place.layer,
            stream=(_place.layer, _place.branch),
            video=_place.video(key.shape[2]),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


def _denoisers(target: Any) -> dict[str, ModelMixin]:
    if isinstance(target, ModelMixin):
        return {"": target}
    found = {name: getattr(target, name, None) for name in _DENOISERS}
    found = {name: model for name, model in found.items() if isinstance(model, ModelMixin)}
    if not found:
        raise InvalidArgumentError(
            f"a diffusers model or a pipeline with one of {', '.join(_DENOISERS)}; found {type(target).__name__}"
        )
    return found
