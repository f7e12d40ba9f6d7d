"""The measured blocks of the pages, which stay as their commands wrote them.

bench/quoted.json has a checksum of each block. A command that measures records the block that it
writes, so a test notices every other change. To record a table that was put into a page by hand,
such as that of `make test-gpu`, name its command: python bench/quoted.py "make test-gpu".
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "bench/quoted.json"
TABLES = "bench/README.md"  # has remarks between the tables, which may be reworded
PAGES = (TABLES, "bench/faults.md", "bench/proofs.md")
# The line that begins a block, and the command that it names, such as `make prove PART=kills`.
_START = re.compile(r"^\d{4}-\d\d-\d\d, .*, Python [^`:]*: `?((?:make )?[\w-]+(?: PART=[\w-]+)?)")
_END = re.compile(r"^(?:## |<!-- /)")


def find_blocks() -> dict[str, str]:
    """Return the text of each measured block, by the command that wrote it."""
    blocks: dict[str, list[str]] = {}
    for page in PAGES:
        block: list[str] | None = None
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
            if start := _START.match(line):
                assert start[1] not in blocks, f"two blocks of {start[1]}"
                block = blocks[start[1]] = [line]
            elif _END.match(line):
                block = None
            elif block is not None and (page != TABLES or line.startswith("|")):
                block.append(line)
    return {command: "\n".join(lines).strip() for command, lines in blocks.items()}


def checksums() -> dict[str, str]:
    """Return the SHA-256 of each measured block as it is now, by its command."""
    return {
        command: hashlib.sha256(text.encode()).hexdigest()
        for command, text in find_blocks().items()
    }


def read() -> dict[str, str]:
    """Return the recorded checksums, by command."""
    recorded: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return recorded


def record(*commands: str) -> None:
    """Record the blocks of these commands as they are now. Raises KeyError if one has no block."""
    now = checksums()
    recorded = read() | {command: now[command] for command in commands}
    recorded = {command: recorded[command] for command in sorted(recorded) if command in now}
    FILE.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(*sys.argv[1:])
