"""Create an environment with only torch, other packages and their requirements: FOLDER [PACKAGE...]

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


def make(folder: Path, *packages: str) -> Path:
    """Create the environment, with torch and these packages; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    found: set[str] = set()
    for name in ("torch", *packages):
        required(name, found)
    for name in found:
        package = distribution(name)
        tops = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
        for top in tops:
            if not (site / top).is_symlink():  # several packages may share a folder, such as nvidia
                (site / top).symlink_to(str(package.locate_file(top)))
    return folder / "bin/python"


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), *sys.argv[2:]))
