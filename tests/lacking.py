"""Exit with 3 and one line if this Python lacks packages: PACKAGE...; used by the Makefile."""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec


def is_installed(package: str) -> bool:
    if find_spec(package.replace("-", "_")):  # with PYTHONPATH, a package may be only a folder
        return True
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    lacking = " ".join(package for package in sys.argv[1:] if not is_installed(package))
    if lacking:
        cure = f"run {sys.executable} -m pip install {lacking}, or omit PYTHON"
        print(f"make: {sys.executable} lacks {lacking}; {cure}", file=sys.stderr)
        sys.exit(3)
