"""The messages between a launcher and its nodes, over ssh, pdsh or srun.

launcher -> node   One message per line (messages.py). An empty line is a sign of life. If the lines
                   end or stop coming, the launcher is gone, and the run ends on this node.
node -> launcher   BEGIN, which no text contains, and `<token>.<node> <message>` on stdout, among
                   the output. A long message is split into several such lines, with a `+` before
                   each part but the last, because srun mixes long lines from its nodes. A line
                   without a message is a sign of life.

In a SLURM step, each line goes to all nodes, and none is needed as a sign of life. The token marks
every process of a run: it is in LAUNCH_TOKEN, followed by the node.
"""

import contextlib
import io
import os
import re
import time
from typing import Any

from launcher.descriptors import wait_for_input
from launcher.own_time import OwnTime
from launcher.typed_json import MessageError, in_pieces
from launcher.wire import limits, messages

BEGIN = "\x02"  # "start of text" in ASCII
LONGEST_MESSAGE = 1 << 20  # bytes
_PIECE = 900  # characters; srun mixes lines that are longer than 1024


# --- on a node ----------------------------------------------------------------------------------


def read_request(fd: int, silence_s: float = limits.SILENCE_S) -> Any | None:
    """Return the launcher's next message, skipping signs of life; None at the end or after silence.

    Also None if a line is not a message. Not a byte more is read, because what follows may
    be meant for another process.
    """
    stream = io.FileIO(fd, closefd=False)
    line = b"\n"
    with contextlib.suppress(MessageError):
        while line == b"\n":
            line = stream.readline() if await_input(fd, silence_s) else b""
        return messages.read(line)
    return None


def await_input(fd: int, silence_s: float) -> bool:
    """Wait until there is something to read. Returns False after `silence_s` seconds without it.

    Time in which this process is suspended does not count.
    """
    own = OwnTime()  # this may be another thread than the main one, to which own_time.now() belongs
    heard = time.monotonic()
    while own.since(heard) <= silence_s:
        if wait_for_input([fd], limits.BEAT_S):
            return True
    return False


def send_message(mark: str, message: object = None, *, begins_line: bool = False) -> None:
    """Send the launcher a message, or a sign of life; `mark` is `<token>.<node>`.

    With `begins_line`, first end the previous line, which may lack its newline.
    """
    *begun, last = in_pieces(messages.write(message), _PIECE) if message is not None else [""]
    with contextlib.suppress(OSError):  # the reader is gone
        if begins_line:
            os.write(1, b"\n")
        for piece in (*(f"+{piece}" for piece in begun), last):
            os.write(1, f"{BEGIN}{mark} {piece}\n".encode())  # one write cannot be split


# --- at the launcher ----------------------------------------------------------------------------


class Answers:
    """Separates the messages of nodes from the other output on their stdout."""

    def __init__(self, token: str) -> None:
        self._mark = f"{BEGIN}{token}.".encode()
        self._pattern = re.compile(re.escape(self._mark) + rb"(.*)\n")
        self._begun = dict[int, bytes]()  # incomplete messages, by node
        self._text = b""  # what may be the beginning of a message

    def read(self, data: bytes) -> tuple[bytes, list[tuple[int, Any]]]:
        """Return the output, and each message with its node; None is a sign of life.

        At the end, when `data` is empty, the output is everything that is left.
        """
        text = self._text + data
        output = []
        received = []
        at = 0
        for line in self._pattern.finditer(text):
            try:
                received.append(self._read_message(line[1]))
                output.append(text[at : line.start()])
            except MessageError:
                output.append(text[at : line.end()])
            at = line.end()

        rest = text[at:]
        begin = self._find_begun(rest) if data else len(rest)
        self._text = rest[begin:]
        return b"".join([*output, rest[:begin]]), received

    def _find_begun(self, text: bytes) -> int:
        """Return where an incomplete message may begin; the length of the text if nowhere.

        Its mark may be incomplete, too.
        """
        begin = text.find(self._mark)
        if begin < 0:
            begin = text.rfind(self._mark[:1])
        is_mark = begin >= 0 and self._mark.startswith(text[begin : begin + len(self._mark)])
        return begin if is_mark and len(text) - begin <= LONGEST_MESSAGE else len(text)

    def _read_message(self, line: bytes) -> tuple[int, Any]:
        """Return the node, and its message; None if that is incomplete, or a sign of life.

        Raises MessageError if the line, or the message that it completes, is not valid.
        """
        number, _, piece = line.partition(b" ")
        if not number.isdigit():
            raise MessageError("no node")
        node = int(number)
        if not piece:
            return node, None

        text = self._begun.pop(node, b"") + piece.removeprefix(b"+")
        if not piece.startswith(b"+"):
            return node, messages.read(text)
        if len(text) <= LONGEST_MESSAGE:  # otherwise the beginning is dropped, and the end invalid
            self._begun[node] = text
        return node, None
