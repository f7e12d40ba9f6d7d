"""List the project's files, each with the first line of its own text: `make files`."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("scripts", "launcher", "distributed", "train.py", "training", "examples", "bench")
WIDTH = 44  # columns of a path


def describe(file: Path) -> str:
    """Return the first line of a file's docstring, or of the comment that begins a script."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comment = re.search(r"^# (?!shellcheck )(.*)", text.replace(" \\\n# ", " "), re.M)
    return comment[1] if comment else ""


def list_files(places: Sequence[str] = PLACES) -> Iterator[tuple[str, str]]:
    """Yield the path and the description of each Python file and script, a package first."""
    for place in places:
        path = ROOT / place
        files = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.sh")]
        for file in sorted(files, key=lambda file: (file.parent, file.name != "__init__.py", file)):
            folder = f"{file.parent.relative_to(ROOT)}/"
            is_package = file.name == "__init__.py"
            yield folder if is_package else str(file.relative_to(ROOT)), describe(file)


if __name__ == "__main__":
    for path, description in list_files(sys.argv[1:] or PLACES):
        print(f"{path:<{WIDTH}} {description}".rstrip())
