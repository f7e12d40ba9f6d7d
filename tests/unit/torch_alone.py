"""Create an environment with only torch and its requirements: FOLDER.

Its packages are links to those of the Python that runs this script.
"""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement


def required(name: str, found: set[str]) -> set[str]:
    """Add a package and its requirements to those found; returns them."""
    if name not in found:
        found.add(name)
        for one in map(Requirement, distribution(name).requires or ()):
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                required(one.name, found)
    return found


def make(folder: Path) -> Path:
    """Create the environment; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in required("torch", set()):
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).is_symlink():  # several packages may share a folder, such as nvidia
                (site / top).symlink_to(str(package.locate_file(top)))
    return folder / "bin/python"


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
