"""The commands that `pip install` creates: each runs the entry script of the same name."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    """Execute the entry script that has the name of this command.

    Sets LAUNCH_PYTHON, the Python to use unless the user chose another, and LAUNCH_AS, the name in
    messages.
    """
    scripts = Path(__file__).parents[1] / "scripts"
    name = Path(sys.argv[0]).stem.removeprefix("launch-")
    (script,) = (path for path in scripts.glob(f"**/{name}.sh") if path.parent.name != "lib")
    os.environ["LAUNCH_PYTHON"] = sys.executable
    os.environ["LAUNCH_AS"] = sys.argv[0]
    os.execvp("bash", ["bash", str(script), *sys.argv[1:]])
