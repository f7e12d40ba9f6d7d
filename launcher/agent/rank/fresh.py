"""Find variables that a script sets before importing torch; forked ranks have already imported it.

The ranks of such a script are new processes. Only the script itself is read, not what it imports.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

from launcher.agent.output.stream import say
from launcher.agent.rank.program import Program

# Variables that torch and the libraries below it read on import, or only once in a process.
_READ_EARLY = "(?:CUDA_|GOMP_|HIP_|KMP_|MKL_|OMP_|OPENBLAS_|PYTORCH_|ROCR_|TORCH|TRITON_)\\w+"
_TORCH = re.compile(r"(import (.+, )?|from )torch\b")
# environ["NAME"] = ..., update({"NAME": ...}), update(NAME=...), setdefault("NAME", ...), putenv.
_SETS = re.compile(
    rf"""["']({_READ_EARLY})["']\s*(?:\]\s*=(?!=)|:)|[(,]\s*({_READ_EARLY})="""
    rf"""|(?:setdefault|putenv)\(\s*["']({_READ_EARLY})["']"""
    # Also assignments to variables whose names are not in the text.
    r"""|environ(?:\.update\((?!\s*(?:\{|\w+=))|\s*\|=(?!\s*\{)|\[(?!\s*["'])[^]]*\]\s*=(?!=))"""
)


def decide_fresh(program: Program, fresh: str | None) -> Program:
    """Return the program with its `is_fresh`, from the variable FRESH or from the script's text.

    If the text decides that ranks are new processes, print why.
    """
    if fresh in ("0", "1") or program.is_command:  # a command is a new process in any case
        return replace(program, is_fresh=fresh == "1")

    script = Path(program.name)
    if program.is_module:
        script = Path(*program.name.split("."))
        script = script / "__main__.py" if script.is_dir() else script.with_suffix(".py")
    names = variables_set_early(script)
    if names:
        say(f"each rank imports torch itself, because {program.name} sets {names[0]} earlier")
    return replace(program, is_fresh=bool(names))


def variables_set_early(script: Path) -> list[str]:
    """Return the names of variables that a script sets above its first import of torch.

    Those set in a function count too, because it is not known when the function is called. A
    variable whose name is not in the text is called "variables". The list is empty if the script
    cannot be read or parsed. Without an import of torch at the top level, all its text counts.
    """
    try:
        text = script.read_bytes()
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # Python itself will report the error

    imports = (line for line in body if isinstance(line, ast.Import | ast.ImportFrom))
    ends = (line.lineno - 1 for line in imports if _TORCH.match(ast.unparse(line)))
    early = b"".join(text.splitlines(keepends=True)[: next(ends, None)]).decode(errors="replace")
    return [next(filter(None, found.groups()), "variables") for found in _SETS.finditer(early)]
