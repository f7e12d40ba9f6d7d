"""Why a rank or a node's agent failed, from its error file or its exit code (no torch)."""

import contextlib
import json
import os
import re
import signal
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import filterfalse
from pathlib import Path

from launcher.explain.kinds import Kind
from launcher.explain.rules import find_rule, refine
from launcher.text import install_command

_ROOT = Path(__file__).parents[1]
# A frame, as a traceback, also of a group of errors, or faulthandler prints it.
_FRAME = re.compile(r'^(?: +\| )? {2}File "(?P<file>.+)", line (?P<line>\d+),? in (?P<name>.+)$')
# A printable character of a file's name, as faulthandler writes it.
_ESCAPED = re.compile(r"\\(?:x[a-f]|u(?!d[89a-f])[0-9a-f]{3}|U000[0-9a-f]{4})[0-9a-f]")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")  # possibly on another machine
_FOREIGN = (
    *(f"{_ROOT}/{folder}/" for folder in ("launcher", "distributed", "scripts")),
    f"{sysconfig.get_path('stdlib')}/",
    "<",
)
_SHOWN_FRAMES = 3
_SHOWN_DETAILS = 3
_LONGEST = 300  # characters of a line
# Lines of an error that only repeat general advice, or that only underline.
_ADVICE = re.compile(
    r"For further information visit|CUDA kernel errors might be|For debugging consider passing"
    r"|Compile with `?TORCH_USE_CUDA_DSA|Search for `cuda|[\W_]*$"
)
_TRACEBACK = "Traceback (most recent call last)"
_SECOND_ERROR = "+---------------- 2 -"  # where the second error of a group begins
# How torch passes on the exception of a data worker, a replica or a pinning thread.
_PASSED_ON = re.compile(r"\S+ Caught \w+ (in .+)\.\nOriginal Traceback(?:.*\n)*  .*\n(?P<own>\S.*)")
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")
# A module of this project: PyPI has other packages with these names.
_OURS = re.compile(r"ModuleNotFoundError: .* '((distributed|training|launcher)(\.\w+)*)'$")
_KIT = "torch_launch_kit"  # the name that scripts import; the launchers put it on their path
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "PyYAML"}
CRASHED = "rank-crashed"
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")
_MEANING = {  # of an exit code or a signal
    "126": "the command could not be executed",
    "127": "the command was not found",
    "SIGKILL": "SIGKILL from outside this run (this node recorded no out-of-memory kill)",
    "SIGSEGV": "SIGSEGV: a crash in native code; the stack is in the log",
    "SIGABRT": "SIGABRT: native code aborted; its last message is in the log",
    "SIGBUS": "SIGBUS: often a full /dev/shm",
    "SIGTERM": "SIGTERM from outside this run",
}


@dataclass(frozen=True)
class Failure:
    """The unrequested end of one rank, or of one node's agent."""

    fault: str  # its section in TROUBLESHOOTING.md
    cause: str
    code: int  # the run's exit code
    host: str
    node_rank: int  # -1: the launcher's machine
    time: float  # seconds since the epoch
    rank: int = -1  # -1: the node's agent
    local_rank: int = -1
    frames: Sequence[str] = ()
    is_consequence: bool = False  # of another rank's end
    step: int = -1  # -1: unknown
    saved_step: int = -1
    log: str = ""
    # Where the ranks were, if the run was stuck: the ranks with each stack, or none for a remark.
    stacks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    has_left: bool = False  # it exited by itself, without an error
    cannot_import: bool = False  # a module is missing, or is not valid Python

    def __post_init__(self) -> None:
        if not 1 <= self.code <= 255:
            raise ValueError(f"{self.code} is not an exit code of a failure")

    @property
    def who(self) -> str:
        """The rank, agent or launcher that failed, with its host, as the failure block names it."""
        if self.node_rank < 0:
            return f"{'job' if self.fault == 'time-limit' else 'launcher'} ({self.host})"
        if self.rank < 0:
            return f"node agent {self.node_rank} ({self.host})"
        return f"rank {self.rank} (local rank {self.local_rank}, {self.host})"


@dataclass(frozen=True)
class RaisedError:
    """What a rank's error file says about the exception that ended the rank."""

    message: str
    stack: str  # the traceback
    code: int  # exit code
    time: float  # seconds since the epoch
    fault: str = ""  # named by the exception's `fault`, and at the end of its message
    notes: str = ""  # added to the exception (PEP 678)
    has_left: bool = False  # not an error: the script called exit()
    details: Sequence[str] = ()  # the errors of a group, and the error that caused this one
    cannot_import: bool = False


def read_error(path: Path) -> RaisedError | None:
    """Return the content of a rank's error file; None if it is missing or incomplete.

    The format is torch's (torch.distributed.elastic.multiprocessing.errors). Its timestamp
    has whole seconds only, so our ranks add the time; otherwise it is the file's modification time.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        return RaisedError(
            message=str(message["message"]),
            stack=str(message["extraInfo"]["py_callstack"]),
            code=int(message.get("errorCode", 1)) % 256 or 1,
            time=float(message.get("time", path.stat().st_mtime)),
            fault=str(message.get("fault", "")),
            notes=str(message.get("notes", "")),
            has_left=message.get("has_left") is True,
            details=[str(line) for line in message.get("details", ())],
            cannot_import=message.get("cannot_import") is True,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # none was written, or the rank was killed while writing it


def describe_end(
    unknown: Failure,  # what is known without the file; its time is when the rank ended
    raised: RaisedError | None,  # the error file's content; None if the rank left none
    *,
    code: int | None,  # the exit code; None if the rank has not exited yet
    is_out_of_memory: bool,  # there was an out-of-memory kill during the attempt
    last_text: str,  # the last line that the rank wrote to stderr
) -> Failure:
    """Return the failure of a rank that an error has ended, or is about to end."""
    if not raised:
        code = code or 1
        fault, cause = explain_exit(code, out_of_memory=is_out_of_memory)
        has_left = not signal_name(code)
        return replace(unknown, fault=fault, cause=cause, code=code, has_left=has_left)

    details = [*details_of(raised.message), *raised.details][:_SHOWN_DETAILS]
    named = raised.fault or fault_of("\n".join([raised.message, *raised.details]))
    fault = refine(named, raised.stack.splitlines())
    message = raised.message.removesuffix(f" [{fault}]")
    if raised.has_left and last_text not in message:
        message += f", after: {last_text}"
    cause = one_line(message) + install_cure(message)

    return replace(
        unknown,
        fault=fault,
        cause=f"{cause} ({one_line(raised.notes)})" if raised.notes else cause,
        code=code if code and code < 128 else raised.code,  # its excepthook may choose another code
        time=raised.time,
        frames=[*details, *user_frames(raised.stack.partition(_SECOND_ERROR)[0].splitlines())],
        is_consequence=fault != CRASHED and is_peer_lost(cause),
        has_left=raised.has_left,
        cannot_import=raised.cannot_import,
    )


def read_traceback(last_line: str, time: float) -> RaisedError:
    """Return the error that a rank's last line shows. A full disk can prevent an error file."""
    has_left = last_line.startswith("KeyboardInterrupt")  # as Python prints it
    return RaisedError(last_line, "", 1, time, has_left=has_left)


def fault_of(message: str) -> str:
    """Return the fault behind an error that names none, from what torch and the system print."""
    rule = find_rule(message)
    # Up to Kind.END, the process that printed the line failed by itself, or timed out waiting.
    return rule.fault if rule and rule.kind <= Kind.END else "rank-error"


def is_peer_lost(message: str) -> bool:
    """Whether an error only says that another rank is gone, or did not arrive."""
    rule = find_rule(message)
    return rule is not None and rule.kind >= Kind.END


def explain_exit(code: int, *, out_of_memory: bool) -> tuple[str, str]:
    """Return the fault and the cause for an exit code, if there is no error file.

    `out_of_memory` means that this node recorded an out-of-memory kill during the attempt.
    """
    name = signal_name(code)
    if name == "SIGKILL" and out_of_memory:
        return "out-of-memory", "SIGKILL from the kernel: this node's memory limit was reached"

    fault = "rank-error"
    if name == "SIGKILL":
        fault = "rank-killed"
    elif name in _CRASHES:
        fault = CRASHED
    unknown = name or f"exited with code {code} without an exception"
    return fault, _MEANING.get(name or str(code), unknown)


def signal_name(code: int) -> str:
    """Return the name of the signal behind an exit code; empty if there is none."""
    try:
        return signal.Signals(code - 128).name
    except ValueError:
        return ""


def one_line(cause: str) -> str:
    """Return the first line of a message, shortened if it would fill the screen."""
    first, *more = _lines_of(cause)
    first = first.rstrip(": ")
    return f"{first[:_LONGEST]} ..." if more or len(first) > _LONGEST else first


def details_of(message: str) -> list[str]:
    """Return the lines after a message's first that say something, such as the missing keys."""
    _, *lines = _lines_of(message.partition(f"\n{_TRACEBACK}")[0])
    details = filterfalse(_ADVICE.match, map(str.strip, lines))
    return [f"{line[:_LONGEST]} ..." if len(line) > _LONGEST else line for line in details]


def _lines_of(message: str) -> list[str]:
    """Return a message's lines. If torch passed the error on, the first one says where from."""
    if passed_on := _PASSED_ON.match(message):
        first = f"{passed_on['own']} ({passed_on[1]})"
        return [first, *message[passed_on.end() :].splitlines()[1:]]
    return message.splitlines() or ["an exception without a message"]


def install_cure(cause: str) -> str:
    """Return "; " and how to get the module that a cause says is missing; "" for other causes."""
    if ours := _OURS.match(cause):
        return f"; if it is the launch kit's: from {_KIT}.{ours[1]} import ..."
    missing = _MISSING.match(cause)
    if not missing:
        return ""

    module = missing[1]
    if module == _KIT:
        return f"; start the script with scripts/launch.sh, or run {install_command(str(_ROOT))}"
    if folder := _folder_of(module):
        return f"; it is in {folder}: set PYTHONPATH={folder}"
    return f"; if it is a package: {install_command(_PACKAGES.get(module, module))}"


def _folder_of(module: str) -> str:
    """Return the folder near the working directory that has a user's own module; "" if none."""
    for folder in ".", "src", "lib", "..", "../src":
        if Path(folder, f"{module}.py").exists() or any(Path(folder, module).glob("*.py")):
            return folder
    return ""


def match_frame(line: str) -> re.Match[str] | None:
    """Match a frame's `file`, `line` and `name`; None if the line shows no frame."""
    # Decode faulthandler's \x, \u and \U: the hexadecimal digits follow these two characters.
    return _FRAME.match(_ESCAPED.sub(lambda found: chr(int(found[0][2:], 16)), line))


def user_frames(stack: Iterable[str]) -> list[str]:
    """Return the last frames of the user's code, at most three: `file:line in name`, last first.

    `stack` has the lines of a traceback: its innermost frame comes last.
    """
    frames = [
        f"{short_path(frame['file'])}:{frame['line']} in {frame['name']}"
        for frame in filter(None, map(match_frame, stack))
        if not is_foreign(frame["file"])
    ]
    return frames[::-1][:_SHOWN_FRAMES]


def is_foreign(file: str) -> bool:
    """Whether a file of a frame is ours, Python's or a library's, not the user's."""
    return file.startswith(_FOREIGN) or bool(_LIBRARY.search(file))


def short_path(path: str) -> str:
    """Return a path relative to the working directory if it lies inside, otherwise unchanged."""
    with contextlib.suppress(OSError):  # the working directory was deleted
        relative = os.path.relpath(path)
        if not relative.startswith(".."):
            return relative
    return path
