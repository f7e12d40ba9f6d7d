"""The pictures of the README, from real runs: `make pictures`, or python docs/pictures.py [NAME].

Runs the launcher on a pseudo-terminal, as a user sees it, and draws what the terminal shows at the
end: docs/run.svg and docs/failure.svg. The name of this machine is shown as node1, and this folder
as ~/launch-kit. A test compares the failure block with what the code prints today.
"""

from __future__ import annotations

import os
import platform
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "docs"
WIDTH = 72  # columns: readable on a telephone
PICTURES = {
    "run": "scripts/ssh/launch_singlenode.sh config/local3.yaml 2",
    "failure": "scripts/ssh/launch_singlenode.sh my.yaml 2",
}
_ESCAPE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07")


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as folder:
            draw(HERE / f"{name}.svg", PICTURES[name], take(name, Path(folder)))


def take(name: str, folder: Path) -> str:
    """Return what a terminal shows after the command of a picture, run in an empty folder."""
    for part in ("scripts", "config"):
        (folder / part).symlink_to(ROOT / part)
    shutil.copy(HERE / "failing.yaml", folder / "my.yaml")
    shutil.copy(HERE / "failing_task.py", folder)
    shown = show(run(PICTURES[name], folder)).rstrip()
    for path, shorter in ((folder, "~/project"), (ROOT, "~/launch-kit")):
        shown = shown.replace(str(path), shorter)
    return shown.replace(platform.node().partition(".")[0], "node1")


def run(command: str, folder: Path) -> str:
    """Return all that a terminal is sent by a command, run in a folder."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(WIDTH), "LINES": "50", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        env={**os.environ, **size, "PYTHON": sys.executable},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    sent = bytearray()
    try:
        while data := os.read(ours, 65536):
            sent += data
    except OSError:  # Linux's end of file on a terminal
        pass
    process.wait()
    os.close(ours)
    return sent.decode()


def show(sent: str) -> str:
    """Return what a terminal shows after all of it: redrawn lines once, colours as they are."""
    lines = [""]
    at = 0
    for escape in [*_ESCAPE.finditer(sent), None]:
        for piece in re.split(r"([\r\n])", sent[at : escape.start() if escape else None]):
            if piece == "\n":
                lines.append("")
            elif piece != "\r":
                lines[-1] += piece
        if escape is None:
            break
        at = escape.end()
        if escape[2] == "m":
            lines[-1] += escape[0]
        elif escape[2] == "K":  # the line is drawn anew
            lines[-1] = ""
        elif escape[2] == "A":
            del lines[-1]
    return "\n".join(lines)


def draw(path: Path, command: str, shown: str) -> None:
    """Write a picture of a terminal: the prompt, the command and what it shows."""
    print(shown)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(shown), end="\n\n")
    picture = console.export_svg(title="launch kit")
    shown_px = 'width="760" '  # at most; a narrow page shows it smaller
    path.write_text(picture.replace("viewBox=", f"{shown_px}viewBox=", 1), encoding="utf-8")


if __name__ == "__main__":
    main()
