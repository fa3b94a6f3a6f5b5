"""Failures as exceptions. Each carries the library's own line, which names the condition that was not met."""

from __future__ import annotations


class Error(RuntimeError):
    """Any failure of vcattn. ``code`` is the vcattn_code of the C ABI, or None where Python refused."""

    code: int | None = None


class InvalidArgumentError(Error, ValueError):
    """The arguments contradict each other or the contract."""

    code = 1


class UnsupportedError(Error, NotImplementedError):
    """A valid request that this build, back end or layer cannot serve."""

    code = 2


class WorkspaceError(Error):
    """The workspace was missing, misaligned or too small: a fault of this layer."""

    code = 3


class NonfiniteInputError(Error, ValueError):
    """NaN or infinity in q, k or v; the message says where."""

    code = 4


class InternalError(Error):
    """A failure inside the library, such as a lack of memory."""

    code = 5


class ScoreOverflowError(Error, ArithmeticError):
    """Scores left the range of FP32."""

    code = 6


class LibraryError(Error, ImportError):
    """The shared library is missing, cannot be loaded or is of another version; `python -m vcattn doctor` says more."""


_BY_CODE = {
    error.code: error
    for error in (
        InvalidArgumentError,
        UnsupportedError,
        WorkspaceError,
        NonfiniteInputError,
        InternalError,
        ScoreOverflowError,
    )
}


def from_code(code: int, text: str) -> Error:
    """The exception for a vcattn_code other than VCATTN_OK."""
    kind = _BY_CODE.get(code)
    return kind(text) if kind is not None else InternalError(f"unknown code {code}: {text}")
