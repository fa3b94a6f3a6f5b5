"""The recipes of the library in plain torch, for devices whose back end does not serve them; see docs/algorithm.md.

Values are quantised and read back ("fake quantisation"); products run in FP32 or, where every operand is exact in BF16,
on the tensor cores. The CPU back end is the oracle: evaluation/tests compares every recipe with it.
"""

from .attention import attention
from .numerics import NotEmulatedError, Numerics
from .state import EmulatedState

__all__ = ["EmulatedState", "NotEmulatedError", "Numerics", "attention"]
