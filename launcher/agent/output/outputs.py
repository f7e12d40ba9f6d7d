"""Where the ranks of one node write: the node log, the launcher's streams, and separate files."""

import tempfile
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import Std

from launcher.agent.control import Control
from launcher.agent.output.stream import LogFile, NodeLog, RankView, Stream, open_stream, say
from launcher.agent.torchrun_arguments import Arguments
from launcher.record.run_folder import RunFolder
from launcher.record.run_json import writing_to
from launcher.screen import has_one_screen
from launcher.terminal import open_again
from launcher.wire import limits
from launcher.wire.messages import Assignment, Membership

STREAMS = {"stdout": Std.OUT, "stderr": Std.ERR}


class Outputs:
    """All outputs of this node's ranks, in every attempt."""

    def __init__(self, args: Arguments) -> None:
        self._args = args
        out = open_again(1)
        self._terminals = out, out if has_one_screen() else open_again(2)
        self.log = NodeLog(None)
        self._files: Path | None = None  # the folder for streams with their own files
        self._step_due = 0.0  # when show_step() next prints

    def keep_in(self, folder: RunFolder) -> None:
        """Write the log and the files to the run's folder from now on."""
        self.log.close()
        self.log = NodeLog(folder.node_log)
        self._files = folder.path

    def open_streams(self, part: Assignment, local_rank: int) -> list[tuple[int, Stream]]:
        """Open a rank's stdout and stderr. Returns the rank's end and the agent's end of each.

        `part` is this node's assignment. For --redirects and --tee, also opens the stream's own
        file; without a run's folder, in a temporary one, which is named on stderr. Raises Refused
        if that file cannot be written.
        """
        args = self._args
        number = part.first_rank + local_rank
        opened = []
        shown = args.shown_ranks(part.first_rank, has_log=self.log.path is not None)
        is_alone = len(shown) == 1 and not args.has_labels
        redirected = args.redirected[local_rank]
        teed = args.teed[local_rank]

        for terminal, (name, kind) in zip(self._terminals, STREAMS.items(), strict=True):
            terminal.open_by = None  # messages between attempts have begun a new line
            goes_only_to_file = kind in redirected & ~teed
            is_shown = local_rank in shown and not goes_only_to_file
            # A labelled stream shares the terminal with other ranks, so its rank gets a pipe.
            label = args.label_of(number, local_rank)
            own_terminal = terminal if is_shown and not label else None
            writer, stream = open_stream(number, self.log, own_terminal)

            if is_shown:
                stream.view = RankView(
                    terminal, is_alone=is_alone, label=label, is_debug=args.is_debug
                )
            if kind in redirected | teed:
                if self._files is None:
                    self._files = Path(tempfile.mkdtemp(prefix="torchelastic_"))
                    say(f"the files of --redirects and --tee are in {self._files}")
                with writing_to(folder := self._files / f"attempt_{part.attempt}/{number}"):
                    stream.copy = LogFile(folder / f"{name}.log", "wb")
            opened.append((writer, stream))
        return opened

    @property
    def is_line_open(self) -> bool:
        """Whether new output would continue an unfinished line of a rank."""
        return any(terminal.open_by is not None for terminal in self._terminals)

    def say(self, text: str) -> None:
        """Print one of the agent's own messages below the ranks' output."""
        self._terminals[1].text.write(f"node agent: {text}\n")

    def show_step(self, step: int) -> None:
        """Print the step every PROGRESS_S seconds, on a node that shows no rank."""
        now = time.monotonic()
        if step >= 0 and now >= self._step_due:
            self.say(f"step {step}")
            self._step_due = now + limits.PROGRESS_S

    def send(self, message: Membership, control: Control | None) -> None:
        """Send a message, at the beginning of a line, to the remote launcher if there is one."""
        if control:
            self.drain()
            control.send(message, is_line_open=self.is_line_open)

    def drain(self) -> None:
        """Wait until all output is written, for at most DRAIN_S per terminal."""
        for terminal in self._terminals:
            terminal.drain(limits.DRAIN_S)

    def close(self) -> None:
        """In a rank, close everything that this object has opened."""
        self.log.close()
        for terminal in {*self._terminals}:
            terminal.let_go()
