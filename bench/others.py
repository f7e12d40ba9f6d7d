"""The launchers to compare with, in throw-away environments on top of this one's torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def find(package: str, command: str) -> Path | None:
    """Return the path of a package's command, installed from PyPI; None if that fails."""
    folder = Path(tempfile.gettempdir(), f"bench-{package}-{os.getuid()}")
    launcher = folder / "bin" / command
    if launcher.exists():
        return launcher
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    ours = subprocess.check_output(
        [sys.executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    next((folder / "lib").glob("python*/site-packages")).joinpath("torch.pth").write_text(ours)
    for packages in (["wheel", "setuptools"], ["--no-build-isolation", package]):
        if not _install(folder, package, packages):
            return None
    return launcher


def version(launcher: Path, package: str) -> str:
    """Return the version of a package in the environment of its launcher."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.check_output([launcher.with_name("python"), "-c", code], text=True).strip()


def _install(folder: Path, package: str, packages: Sequence[str]) -> bool:
    told = subprocess.run(
        [folder / "bin/python", "-m", "pip", "install", "-q", *packages],
        env={**os.environ, "DS_BUILD_OPS": "0"},  # of DeepSpeed only the launcher is needed
        stderr=subprocess.PIPE,
        text=True,
    )
    if told.returncode != 0:
        reason = told.stderr.strip().splitlines()[-1]
        print(f"{package} is not measured: {reason}", file=sys.stderr)
    return told.returncode == 0
