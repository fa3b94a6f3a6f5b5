"""Finds, loads and checks the shared library, once, at the first call that needs it.

The library is that named by the environment variable VCATTN_LIBRARY, else the one inside the package. Importing vcattn
loads nothing, so that `python -m vcattn doctor` can report on a library that does not load.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from . import _abi
from .errors import LibraryError, from_code

ENVIRONMENT_VARIABLE = "VCATTN_LIBRARY"


class Backend(NamedTuple):
    """A back end of the library: whether it can run here, and on what or why not."""

    name: str
    available: bool
    reason: str


_library: ctypes.CDLL | None = None


def path() -> Path:
    """Where the library is looked for."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(named) if named else Path(__file__).parent / "lib" / "libvcattn.so"


def load(where: Path) -> ctypes.CDLL:
    """Loads the library at `where` and declares its functions. Raises LibraryError where it does not fit."""
    if not where.exists():
        raise LibraryError(
            f"no library at {where}: `pip install .` builds it; {ENVIRONMENT_VARIABLE} names one built otherwise"
        )
    try:
        library = ctypes.CDLL(str(where))
    except OSError as error:
        raise LibraryError(f"{where} does not load: {error}") from error
    for name, (result, arguments) in _abi.FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise LibraryError(
                f"{where} has no function {name}: it is not of version {_abi.VERSION}, which this package was made for"
            ) from error
        function.restype, function.argtypes = result, arguments
    _check_version(library, where)
    return library


def _check_version(library: ctypes.CDLL, where: Path) -> None:
    found = library.vcattn_version().decode()
    if found != _abi.VERSION:
        raise LibraryError(f"{where} is version {found}; this package was made for {_abi.VERSION}")
    # A larger buffer than the struct, so that a library with a larger one shows it without writing past the end.
    room = ctypes.create_string_buffer(4 * ctypes.sizeof(_abi.AttentionParams))
    library.vcattn_attention_params_init(room)
    size = _abi.AttentionParams.from_buffer(room).struct_size
    if size != ctypes.sizeof(_abi.AttentionParams):
        raise LibraryError(
            f"{where} takes attention parameters of {size} bytes; this package was made for "
            f"{ctypes.sizeof(_abi.AttentionParams)}"
        )


def get() -> ctypes.CDLL:
    """The library, loaded at the first call. Raises LibraryError."""
    global _library
    if _library is None:
        _library = load(path())
    return _library


def check(code: int, message: _abi.Message) -> None:
    """Raises the exception for `code`, with the library's line, unless it is VCATTN_OK."""
    if code != _abi.OK:
        raise from_code(code, message.text.decode(errors="replace"))


def version() -> str:
    """Version of the loaded library, "major.minor.patch"."""
    return get().vcattn_version().decode()


def backends() -> list[Backend]:
    """The back ends of this build in order of preference."""
    library, found = get(), []
    available, reason = ctypes.c_int32(), _abi.Message()
    while True:
        name = library.vcattn_backend_info(len(found), ctypes.addressof(available), ctypes.addressof(reason))
        if name is None:
            return found
        found.append(Backend(name.decode(), bool(available.value), reason.text.decode(errors="replace")))
