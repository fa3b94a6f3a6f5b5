"""What every adapter shares: the policy, the states of the streams, the step, and the host's attention to fall back to.

An adapter knows how its host tells layers, steps and branches; a Session knows what to do with them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch

from .. import torch_op
from .._call import recipe_facts
from .._torch_arrays import NO_BACKWARD, needs_gradient
from ..attention import attention
from ..errors import InvalidArgumentError, ScoreOverflowError, UnsupportedError
from ..policy import DEFAULT_MIN_SEQLEN, GROUPING_MIN_SEQLEN, Policy, as_policy
from ..report import Report
from ..schedule import DEFAULT_KIND, MAX_STEPS, Schedule, check_kind
from ..state import State
from ..torch_sdpa import key_mask, mask_refusal


class Session:
    """One host's calls. Not for several threads at once.

    policy: as vcattn.policy.as_policy takes it: a Policy, a .json file, a recipe, or None.
    schedule: kind of vcattn.Schedule by which requests keep the order of the values; None: every call makes its own,
        and calls that this does not pay for stay with the host unless the policy is a Policy or a file.
    Raises InvalidArgumentError for others.
    report: what became of the calls. step, num_steps: of the current request, None outside of one.
    """

    def __init__(
        self, integration: str, host: str, *, policy: Policy | str | Path | None, schedule: str | None = DEFAULT_KIND
    ) -> None:
        if schedule is not None:
            check_kind(schedule)
        min_seqlen = GROUPING_MIN_SEQLEN if schedule is None else DEFAULT_MIN_SEQLEN
        self.policy, self.schedule = as_policy(policy, min_seqlen=min_seqlen), schedule
        self.report = Report(integration, host)
        self.step: int | None = None
        self.num_steps: int | None = None
        self._states: State | None = None

    def begin(self, num_steps: int) -> None:
        """A new request of `num_steps` denoising steps starts, at step 0, with nothing kept of the last one. Where that
        is no number of steps, none is known."""
        if not 1 <= num_steps <= MAX_STEPS:
            self.end()
            return
        self.step, self.num_steps = 0, num_steps
        self._states = None if self.schedule is None else State(Schedule(num_steps, self.schedule))

    def set_step(self, step: int) -> None:
        """Step `step` of the request starts; steps past its end are not known (host adds some of its own)."""
        known = self.num_steps is not None and 0 <= step < self.num_steps
        self.step = step if known else None

    def end(self) -> None:
        """The request is over; its orders are freed."""
        self.step = self.num_steps = self._states = None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        native: Callable[[], Any],
        *,
        layout: str = "BSHD",
        layer: str | None = None,
        stream: tuple[Hashable, ...] | None = None,
        video: tuple[int, int] | None = None,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
    ) -> Any:
        """The host's call: served, or answered by `native()` and counted.

        layer: its name, for the policy. stream: its key, for the state: layer, branch, expert ...; None: no state.
        video: number of the first video token among the keys, and of video tokens; the others are text, which is kept
            out of the video's order. None: not known.
        attn_mask: as in scaled_dot_product_attention. Other arguments: as in vcattn.attention.
        """
        if torch.compiler.is_compiling():
            layer = stream = video = None  # constants of the graph: they would be those of the call that was traced
        heads_axis, tokens_axis = (1, 2) if layout == "BHSD" else (2, 1)
        sizes = (q.shape[0], q.shape[heads_axis], q.shape[tokens_axis], k.shape[tokens_axis])
        step = None if torch.compiler.is_compiling() else self.step
        choice = self.policy.choose(
            layer=layer, step=step, num_steps=self.num_steps, seqlen_q=sizes[2], seqlen_kv=sizes[3]
        )
        if choice.recipe is None:
            _note_fallback(self, choice.reason, True)
            return native()
        reason = _refusal(q, k, v, sizes, attn_mask, dropout_p, is_causal)
        if reason is None and torch.compiler.is_compiling():
            swapped = (x if layout == "BHSD" else x.transpose(1, 2) for x in (q, k, v))
            reason = torch_op.traced_refusal(choice.recipe, *swapped, scale)
        if reason is not None:
            _note_fallback(self, reason, False)
            return native()
        options = dict(
            recipe=choice.recipe,
            layout=layout,
            scale=scale,
            key_padding_mask=None if attn_mask is None else key_mask(attn_mask, sizes[3]),
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            allow_nonfinite=True,
        )
        if video is not None and recipe_facts(choice.recipe).order is not None:  # cubes need more than the number
            options.update(grid=(video[0], 1, 1, video[1]))
        if torch.compiler.is_compiling():
            _note_served(self)
            return attention(q, k, v, **options)
        if stream is not None and step is not None and self._states is not None:
            options.update(state=self._states.of(*stream), step=step)
        try:
            out = attention(q, k, v, **options)
        except (UnsupportedError, InvalidArgumentError, ScoreOverflowError) as error:
            _note_fallback(self, str(error), False)
            return native()
        _note_served(self)
        return out


def _refusal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sizes: tuple[int, int, int, int],
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> str | None:
    if dropout_p != 0.0:
        return "dropout_p is 0: there is no dropout"
    if is_causal:
        return "is_causal is False: there is no causal mask"
    if needs_gradient(q, k, v):
        return NO_BACKWARD
    if attn_mask is None:
        return None
    found = mask_refusal(attn_mask, sizes)
    return None if found is None else found.reason


def _note_served(session: Session) -> None:
    if not torch.compiler.is_compiling():  # nothing is counted in compiled code
        session.report.served += 1


def _note_fallback(session: Session, reason: str, quiet: bool) -> None:
    if not torch.compiler.is_compiling():
        session.report.count_fallback(reason, quiet=quiet, stacklevel=4)
