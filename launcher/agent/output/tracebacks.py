"""The traceback at the end of a rank's output, held back from the terminal.

When a rank fails, the others lose their connections to it and print tracebacks too. Those would
appear above the failure block and hide the cause.
"""

import re
import time

_MOST_BYTES = 1 << 18  # longer than any traceback
_MARK = b"Traceback (most recent call last)"
_BEFORE = re.compile(rb"(\[rank\d+\]: )?[^\w\n\r\]:]*(Exception Group )?\Z")  # on the same line


class HeldTraceback:
    """A stream's output from the first line of a traceback onwards, while it is held back."""

    def __init__(self) -> None:
        self.text = bytearray()
        self._since = 0.0

    def hold_back(self, data: bytes) -> bytes:
        """Return the part of new output to show now, and hold the rest.

        Everything from the first traceback on is held, and released once it is too long for one.
        """
        if self.text:
            self.text += data
            return self.release() if len(self.text) > _MOST_BYTES else b""

        at = data.find(_MARK)
        if at < 0:
            return data
        before = _BEFORE.search(data, max(0, at - 200), at)  # a prefix of the line is short
        at = before.start() if before else at
        self._since = time.monotonic()
        self.text += data[at:]
        return data[:at]

    def release(self) -> bytes:
        """Return the held text, and stop holding it."""
        held = bytes(self.text)
        self.text.clear()
        return held

    def age(self, now: float) -> float:
        """Return how many seconds text has been held; 0 if none is held."""
        return now - self._since if self.text else 0.0
