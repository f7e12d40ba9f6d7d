"""The scripts that start no run: read and execute their command lines.

python scripts/lib/start.py launcher.cli.tools SCRIPT WORDS      (run_tool in scripts/lib/launch.sh)
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from distributed.errors import BAD_INPUT
from launcher.text import Environ, did_you_mean, warn

CHECKPOINT = {"ls": "DIR", "verify": "DIR", "export": "DIR FILE", "hash": "DIR"}


def main(arguments: Sequence[str], environ: Environ) -> int:
    """Run explain.sh or checkpoint.sh, as typed. Returns the exit code: BAD_INPUT if refused."""
    program = Path(arguments[0]).name
    words = arguments[1:]
    if "explain" in program:
        return int(import_module("launcher.explain.main").main(words, environ, program))
    if why := refusal(words):
        warn(f"{program}: {why}; see {program} --help")
        return BAD_INPUT
    return int(import_module("launcher.cli.checkpoint").main(words))  # needs torch


def refusal(words: Sequence[str]) -> str:
    """Return why scripts/checkpoint.sh rejects these words; empty if it accepts them."""
    commands = ", ".join(map(" ".join, CHECKPOINT.items()))
    if not words:
        return f"no command; choose from {commands}"
    name, *given = words
    if name not in CHECKPOINT:
        return f"unknown command {name!r}; {did_you_mean(name, CHECKPOINT)}choose from {commands}"
    if len(given) != len(CHECKPOINT[name].split()):
        return f"{name} needs {CHECKPOINT[name]}, but got {' '.join(given) or 'nothing'}"
    return ""
