"""Messages from torch's C++ code that appear at every start and mean nothing."""

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator

# torch looks up the host name of each client of its store, but uses it only in messages. If no name
# server answers, the first message below appears at every start, although nothing is wrong. In the
# second message, torch before 2.8 reports that it lacks the store that serve_store tries first.
_TEXT = b"[c10d] The "
_LINES = re.compile(
    rb"^(\[rank\d+\]:)?\[(W[^\n]* socket|E[^\n]* TCPStore)\.cpp:\d+\] \[c10d\] The "
    rb"(hostname of the client socket cannot be retrieved|libuv TCPStore backend does not)[^\n]*\n",
    re.MULTILINE,
)
_MAY_BE = re.compile(rb"\[([Wr][^\r\n]*)?\Z")  # the start of such a line
_LONGEST = 1024


def may_begin(line: bytes) -> bool:
    """Whether an unfinished line may turn out to be one of these messages."""
    return len(line) < _LONGEST and _MAY_BE.match(line) is not None


def drop(data: bytes, *, is_debug: bool) -> bytes:
    """Return `data` without these messages, or unchanged with `is_debug`."""
    return data if is_debug or _TEXT not in data else _LINES.sub(b"", data)


@contextlib.contextmanager
def without_noise(fd: int, *, is_debug: bool) -> Iterator[None]:
    """Hold back what this process writes to a descriptor, then write it without torch's noise."""
    kept = os.dup(fd)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), fd)
        try:
            yield
        finally:
            os.dup2(kept, fd)
            os.close(kept)
            held_back.seek(0)
            with contextlib.suppress(OSError):
                os.write(fd, drop(held_back.read(), is_debug=is_debug))
