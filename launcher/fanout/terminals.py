"""The launcher's terminal, on which the output of all nodes appears without mixing lines."""

from launcher.fanout.loop import Show
from launcher.screen import View, has_one_screen
from launcher.terminal import Terminal


class Terminals:
    """The launcher's stdout and stderr, which show the streams of all nodes."""

    def __init__(self) -> None:
        self.out = Terminal(1)
        self.err = self.out if has_one_screen() else Terminal(2)
        self.is_waiting = False  # an unfinished line is not shown yet
        self._views = list[View]()

    def make_show(self, prefix: bytes) -> Show:
        """Return a function that shows one program's output; no data means the end of a stream."""
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

    def show_held(self, now: float) -> None:
        """Show lines that have been unfinished for a while.

        `now` is a time before the nodes were last read.
        """
        self.is_waiting = bool([view for view in self._views if view.show_held(now)])
