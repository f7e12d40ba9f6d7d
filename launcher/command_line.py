"""torchrun's command line: what is read without torch, and what is passed to torch's parsers."""

import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence

from launcher.text import Environ, whole
from launcher.wire.limits import GRACE_S, SILENCE_S

_FLAGS = (  # options without a value
    "-h",
    "--help",
    "-m",
    "--module",
    "--no-python",
    "--standalone",
    "--run-path",
    "--use-env",
    "--virtual-local-rank",
)

RANGE_CURE = "a range needs --rdzv-backend c10d; add it, or give one number"


def split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return torchrun's options, and the program with its arguments.

    No parser may see the program's arguments: argparse would reject a script's `--log` as
    ambiguous, because two torchrun options begin with it.
    """
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-":
        word = arguments[at].replace("_", "-")
        if word == "--":
            return arguments[:at], arguments[at + 1 :]

        has_own_value = "=" in word or (word[1] != "-" and len(word) > 2)  # such as -r3
        is_flag = any(flag.startswith(word) for flag in _FLAGS)  # options may be abbreviated
        at += 1 if has_own_value or is_flag else 2  # the next word is the value
    return arguments[:at], arguments[at:]


def find_option(arguments: Sequence[str], name: str) -> str:
    """Return the last value of a torchrun option, which may be abbreviated; empty if none is given.

    `name` has its dashes: --node-rank.
    """
    options = split(arguments)[0]
    given = ""
    for word, value in itertools.zip_longest(options, options[1:], fillvalue=""):
        option, equals, its_value = word.partition("=")
        # "-" and "--" are no abbreviations.
        if len(option) > 2 and name.startswith(option.replace("_", "-")):
            given = its_value if equals else value
    return given


def read_grace(arguments: Sequence[str], environ: Environ) -> float:
    """Return how long the ranks have to save, in seconds: by the option, or by a variable.

    The first that is set counts. Returns GRACE_S if none is set, or if it is not a number.
    """
    names = "GRACE", "PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    given = [find_option(arguments, "--shutdown-timeout"), *map(environ.get, names)]
    first = next(filter(None, given), GRACE_S)
    try:
        return max(0.0, float(first))
    except ValueError:
        return GRACE_S  # torch's parser rejects what is not a number


def read_silence(environ: Environ, usual_s: float = SILENCE_S) -> float:
    """Return after how many seconds without a heartbeat another node or the launcher is lost.

    That is SILENCE_SECONDS or, if it is not set, `usual_s`.
    """
    return whole(environ.get("SILENCE_SECONDS", "")) or usual_s  # 0 is not valid


def read_for_torch(parse: Callable[[list[str]], Namespace], arguments: Sequence[str]) -> Namespace:
    """Parse the command line for torch's own launcher, which treats program arguments as templates.

    `parse` is torch's parser; `$` is escaped, so that the program gets its arguments unchanged.
    """
    options, program = split(arguments)
    args = parse([*options, *program[:1]])
    args.training_script_args = [word.replace("$", "$$") for word in program[1:]]
    return args
