"""What a launcher and its nodes pass each other, over ssh, through pdsh and srun.

launcher -> node   a message a line (messages.py). An empty line is a sign of life. Their end, or
                   silence, means that the launcher is gone: that ends the run on this node.
node -> launcher   BEGIN, which no text has, and `<token>.<node> <message>` on stdout, among the
                   output. A long message has several such lines, all but the last with a `+`
                   before their part: srun mixes the long lines of its nodes. A line without a
                   message is a sign of life.

In a step of a SLURM job nothing goes to the nodes. The token marks every process of a run: it is in
LAUNCH_TOKEN, over ssh with the node.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import time
from typing import Any

from launcher.own_time import OwnTime
from launcher.typed_json import MessageError, in_pieces
from launcher.wire import limits, messages

BEGIN = "\x02"  # ASCII's start of a text
LONGEST_MESSAGE = 1 << 20  # bytes
_PIECE = 900  # characters; srun mixes lines that are longer than 1024


# --- on a node ----------------------------------------------------------------------------------


def read_request(fd: int) -> Any | None:
    """Return the launcher's next message, beats aside; None at its end, or after silence.

    Not a byte more is read: what follows may be another process's.
    """
    stream, line = io.FileIO(fd, closefd=False), b"\n"
    with contextlib.suppress(MessageError):
        while line == b"\n":
            line = stream.readline() if hears(fd) else b""
        return messages.read(line)
    return None


def hears(fd: int) -> bool:
    """Wait until there is something to read; False after SILENCE_S seconds without."""
    own, heard = OwnTime(), time.monotonic()
    while own.since(heard) <= limits.SILENCE_S:
        if select.select([fd], [], [], limits.BEAT_S)[0]:
            return True
    return False


def tell(mark: str, message: object | None = None, *, begins_line: bool = False) -> None:
    """Send the launcher a message, or a sign of life; `mark` is the token with the node.

    Where it `begins_line`, the line before it may lack its end.
    """
    *begun, last = in_pieces(messages.write(message), _PIECE) if message is not None else [""]
    with contextlib.suppress(OSError):  # nobody reads any more
        if begins_line:
            os.write(1, b"\n")
        for piece in (*(f"+{piece}" for piece in begun), last):
            os.write(1, f"{BEGIN}{mark} {piece}\n".encode())  # in one piece, whoever else writes


# --- at the launcher ----------------------------------------------------------------------------


class Answers:
    """What nodes write to stdout: their messages are taken out of their output."""

    def __init__(self, token: str) -> None:
        self._mark = f"{BEGIN}{token}.".encode()
        self._begun: dict[int, bytes] = {}  # messages, by node
        self._text = b""  # what may be a message, or its beginning

    def read(self, data: bytes) -> tuple[bytes, list[tuple[int, Any]]]:
        """Return the output, and each message with its node: None is a sign of life.

        At the end, without data, the output is all that is left.
        """
        text, output, told = self._text + data, [], []
        while (at := text.find(self._mark)) >= 0 and (end := text.find(b"\n", at)) >= 0:
            try:
                told.append(self._take(text[at + len(self._mark) : end]))
                output.append(text[:at])
            except MessageError:
                output.append(text[: end + 1])
            text = text[end + 1 :]
        if at < 0 and self._mark.startswith(text[text.rfind(self._mark[:1]) :]):
            at = text.rfind(self._mark[:1])  # its beginning
        if at < 0 or not data or len(text) - at > LONGEST_MESSAGE:
            at = len(text)
        self._text = text[at:]
        return b"".join([*output, text[:at]]), told

    def _take(self, line: bytes) -> tuple[int, Any]:
        """Return the node, and the message that it has told in full; raises MessageError."""
        number, _, piece = line.partition(b" ")
        if not number.isdigit():
            raise MessageError("no node")
        node = int(number)
        if not piece:
            return node, None
        text = self._begun.pop(node, b"") + piece.removeprefix(b"+")
        if not piece.startswith(b"+"):
            return node, messages.read(text)
        if len(text) <= LONGEST_MESSAGE:
            self._begun[node] = text
        return node, None
