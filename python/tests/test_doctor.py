"""python -m vcattn doctor: what it names, and when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import vcattn
from vcattn import _abi, _library
from vcattn.__main__ import main
from vcattn.doctor import doctor


def test_a_sound_installation():
    lines: list[str] = []
    assert doctor(lines.append) == 0
    text = "\n".join(lines)
    assert f"version {_library.version()}, as this package was made for" in text
    assert "back end cpu: runs here with" in text and "cpu self-test: ok" in text
    assert "BROKEN" not in text


def run(library: Path | str, *first: Path) -> subprocess.CompletedProcess[str]:
    """`first`: folders whose modules come before those that are installed."""
    path = os.pathsep.join([*map(str, first), *sys.path])
    environment = dict(os.environ, VCATTN_LIBRARY=str(library), PYTHONPATH=path)
    command = [sys.executable, "-m", "vcattn", "doctor"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_missing_library(tmp_path: Path):
    found = run(tmp_path / "libvcattn.so")
    assert found.returncode == 1 and "no library at" in found.stdout


def test_something_that_is_no_library(tmp_path: Path):
    (tmp_path / "libvcattn.so").write_text("nothing")
    found = run(tmp_path / "libvcattn.so")
    assert found.returncode == 1 and "does not load" in found.stdout


def test_undefined_symbol_after_an_upgrade(monkeypatch: pytest.MonkeyPatch):
    """A library without a function that this package calls, and one of another version: both are named."""
    monkeypatch.setitem(_abi.FUNCTIONS, "vcattn_of_tomorrow", (None, []))
    lines: list[str] = []
    assert doctor(lines.append) == 1
    assert any("has no function vcattn_of_tomorrow" in line and _abi.VERSION in line for line in lines)
    monkeypatch.delitem(_abi.FUNCTIONS, "vcattn_of_tomorrow")
    monkeypatch.setattr(_abi, "VERSION", "9.9.9")
    lines.clear()
    assert doctor(lines.append) == 1
    assert any(f"is version {_library.version()}; this package was made for 9.9.9" in line for line in lines)


@pytest.mark.parametrize(
    "source, reason",
    [
        ("raise ImportError('multiarray failed to import')", "multiarray failed to import"),
        ("raise RuntimeError('made for another Python')", "made for another Python"),
        ("raise ValueError", "ValueError"),
        ("", "cannot import name 'dtype' from 'numpy'"),
    ],
)
def test_numpy_absent_or_broken(tmp_path: Path, source: str, reason: str):
    """The rest of the report is there, nothing is tried, and the exit code says that the package does not work."""
    (tmp_path / "numpy.py").write_text(source)
    found = run(_library.path(), tmp_path)
    assert found.returncode == 1 and found.stderr.count("Traceback") == 0, found.stderr
    assert f"numpy: BROKEN: {reason}" in found.stdout and "self-test" not in found.stdout
    assert "back end cpu: runs here with" in found.stdout and "\nbroken: numpy" in found.stdout


def test_without_numpy_what_needs_it_says_so(tmp_path: Path):
    (tmp_path / "numpy.py").write_text("raise ImportError('gone')")
    program = "import vcattn; from vcattn import *; print(vcattn.recipe_names()[0]); vcattn.attention"
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.stdout == "accurate\n" and "vcattn.attention needs numpy: gone" in found.stderr, found.stderr


def test_wrong_results_are_broken(monkeypatch: pytest.MonkeyPatch):
    attention = vcattn.attention
    monkeypatch.setattr(vcattn, "attention", lambda q, k, v, **options: attention(q, k, v, **options) * len(options))
    lines: list[str] = []
    assert doctor(lines.append) == 1 and any("BROKEN cpu self-test" in line for line in lines)


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "x.json").write_text("{}")
    assert main(["plot", str(tmp_path / "x.json"), "x.png"]) == 1
    assert capsys.readouterr().err.startswith("vcattn: ")
    assert isinstance(vcattn.LibraryError("x"), ImportError)
