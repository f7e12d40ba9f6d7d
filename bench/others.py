"""Other packages that we compare or test with, in temporary environments on top of our torch."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path


def find(package: str, command: str) -> Path | None:
    """Return the path of a package's command, installed from PyPI; None if that fails."""
    launcher = environment(package, [package]).with_name(command)
    return launcher if launcher.exists() else None


def environment(name: str, packages: Sequence[str]) -> Path:
    """Return the Python of an environment that has as many of the packages as can be installed."""
    folder = Path(tempfile.gettempdir(), f"bench-{name}-{os.getuid()}")
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        _install(python, "setuptools", ["wheel", "setuptools"])
    theirs = next((folder / "lib").glob("python*/site-packages"))
    ours = sysconfig.get_path("purelib")  # may have changed since the environment was created
    theirs.joinpath("torch.pth").write_text(ours)
    for package in packages:
        if not version(python, package):
            _install(python, package, ["--no-build-isolation", package])
    return python


def version(launcher: Path, package: str) -> str:
    """Return the version of a package in the environment of its launcher; "" if it is not there."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run(
        [launcher.with_name("python"), "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return told.stdout.strip()


def _install(python: Path, what: str, words: Sequence[str]) -> None:
    told = subprocess.run(
        [python, "-m", "pip", "install", "-q", *words],
        env={**os.environ, "DS_BUILD_OPS": "0"},  # build no DeepSpeed kernels
        stderr=subprocess.PIPE,
        text=True,
    )
    if told.returncode != 0:
        reason = told.stderr.strip().splitlines()[-1]
        print(f"{what} is skipped: {reason}", file=sys.stderr)
