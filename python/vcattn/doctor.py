"""`python -m vcattn doctor`: what is installed, what it was made for, what runs here and why not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import vcattn

from . import _abi, _library
from .errors import LibraryError

if TYPE_CHECKING:
    import numpy as np

# Distributions of the hosts that have an adapter, by the module that is imported.
_HOSTS = {"diffusers": "diffusers", "comfy": "comfyui", "sglang": "sglang", "xfuser": "xfuser", "lightx2v": "lightx2v"}
_TOLERANCE = 0.05  # relative L2 of `accurate` on the little call below


def doctor(write: Callable[[str], object] = print) -> int:
    """Writes the report; returns 0 where everything that is there works, else 1."""
    broken: list[str] = []
    write(f"vcattn {_abi.VERSION} for Python, {platform.python_version()} on {platform.platform()}")
    where = _library.path()
    write(f"library: {where}")
    try:
        _library.load(where)
    except LibraryError as error:
        write(f"  BROKEN: {error}")
        write(f"  made for: version {_abi.VERSION}, which `pip install .` of the same checkout builds")
        return 1
    write(f"  version {_library.version()}, as this package was made for")
    for backend in _library.backends():
        write(f"  back end {backend.name}: {'' if backend.available else 'not available: '}{backend.reason}")
    if vcattn.NUMPY_ERROR:
        write(f"numpy: BROKEN: {vcattn.NUMPY_ERROR}; vcattn needs it, and nothing could be tried without")
        broken.append("numpy")
    else:
        write(f"numpy {_version('numpy', 'numpy')}")
        _check("cpu self-test", _self_test_cpu, write, broken)
    _report_torch(write, broken)
    for module, distribution in _HOSTS.items():
        write(f"{module}: {_version(module, distribution) or 'not installed'}")
    if broken:
        write(f"broken: {', '.join(broken)}")
    return 1 if broken else 0


def _check(name: str, test: Callable[[], None], write: Callable[[str], object], broken: list[str]) -> None:
    try:
        test()
    except Exception as error:  # whatever it is, it is what the report is for
        write(f"  BROKEN {name}: {error}")
        broken.append(name)
    else:
        write(f"  {name}: ok")


def _sample() -> list[np.ndarray]:
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 300, 2, 128), dtype=np.float32) for _ in range(3)]


def _compare(found: np.ndarray, expected: np.ndarray) -> None:
    error = float(((found - expected) ** 2).sum() / (expected**2).sum()) ** 0.5
    if not error < _TOLERANCE:
        raise AssertionError(f"accurate differs from fp32 by {error:.3g}; expected less than {_TOLERANCE}")


def _self_test_cpu() -> None:
    q, k, v = _sample()
    _compare(vcattn.attention(q, k, v), vcattn.attention(q, k, v, recipe="fp32"))


def _report_torch(write: Callable[[str], object], broken: list[str]) -> None:
    found = _version("torch", "torch")
    if found is None:
        write("torch: not installed (numpy arrays alone)")
        return
    try:
        torch = importlib.import_module("torch")
        if not vcattn.NUMPY_ERROR:
            importlib.import_module("vcattn.torch_op")
    except Exception as error:  # a broken torch raises anything
        write(f"torch {found}: BROKEN: {error}")
        broken.append("torch")
        return
    cuda = torch.version.cuda
    write(f"torch {found}, " + (f"built for CUDA {cuda}" if cuda else "built without CUDA"))
    if not torch.cuda.is_available():
        write("  no CUDA device that torch can use")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        write(f"  cuda:{index}: {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}")
        with torch.cuda.device(index):
            able = [b.name for b in _library.backends() if b.available and b.name != "cpu"]
            reasons = "; ".join(f"{b.name}: {b.reason}" for b in _library.backends() if b.name != "cpu")
            if not able:
                write(f"    nothing runs here: {reasons or 'this build has no GPU back end'}")
                continue
            if vcattn.NUMPY_ERROR:
                continue

            def test() -> None:
                q, k, v = _sample()
                on_card = vcattn.attention(*(torch.from_numpy(x).bfloat16().cuda(index) for x in (q, k, v)))
                _compare(on_card.float().cpu().numpy(), vcattn.attention(q, k, v, recipe="fp32"))

            _check(f"cuda:{index} self-test of {able[0]}", test, write, broken)


def _version(module: str, distribution: str) -> str | None:
    if module in sys.modules and sys.modules[module] is None:  # hidden on purpose
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "found, version unknown" if importlib.util.find_spec(module) is not None else None
