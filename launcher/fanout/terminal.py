"""Where a launcher shows what its nodes print."""

from __future__ import annotations

from launcher.fanout.loop import Show
from launcher.screen import View, are_one_file
from launcher.terminal import Terminal


class Terminals:
    """The launcher's stdout and stderr, and the streams of all nodes on them."""

    def __init__(self) -> None:
        self.out = Terminal(1)
        self.err = self.out if are_one_file(1, 2) else Terminal(2)
        self.is_waiting = False  # a line has begun, and is not shown yet
        self._views: list[View] = []

    def show_behind(self, prefix: bytes) -> Show:
        """Return a function that shows one program's output; nothing means the end of a stream."""
        screens = self.out, self.err
        views = [View(screen, is_alone=False, prefix=prefix) for screen in screens]
        self._views += views

        def show(data: bytes, is_error: bool) -> None:
            view, screen = views[is_error], screens[is_error]
            if data:
                view.add(data)
                return
            view.end()
            if screen.open_by is view:
                screen.end_line()

        return show

    def tick(self, now: float) -> None:
        """Show the lines that have begun and do not end.

        `now` is a time before the nodes were last read.
        """
        self.is_waiting = bool([view for view in self._views if view.tick(now)])
