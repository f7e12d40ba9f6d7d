"""The commands that `pip install` makes: each runs the entry script of its name."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Become the entry script, with the Python that this is installed for unless one is chosen."""
    scripts = Path(__file__).parents[1] / "scripts"
    name = Path(sys.argv[0]).stem.removeprefix("launch-")
    files = scripts.glob(f"**/{name}.sh")
    (script,) = (path for path in files if path.parent.name != "lib")
    os.environ["LAUNCH_PYTHON"] = sys.executable
    os.environ["LAUNCH_AS"] = sys.argv[0]
    os.execvp("bash", ["bash", str(script), *sys.argv[1:]])
