"""One restart of a run, and what it cost."""

from dataclasses import dataclass

from launcher.text import count


@dataclass(frozen=True)
class Restart:
    """One restart, as run.json keeps it."""

    number: int  # from 1
    fault: str
    cause: str
    who: str  # the rank or node that failed
    step: int  # that the run had reached; -1 if unknown
    saved_step: int  # from which it continues; -1 if unknown
    failed: float  # seconds since the epoch
    is_counted: bool = False  # the script reports no saves; it may start from step 0
    is_from_memory: bool = False  # it continues from a snapshot
    lost_s: float = 0.0  # until that step was reached again; 0 if not yet
    lost: tuple[str, ...] = ()  # hosts of nodes that were lost
    replaced: tuple[str, ...] = ()  # which spares replaced them

    def describe(self, most: int) -> str:
        """Return what failed, and what it cost, in one line. `most` is MAX_RESTARTS."""
        text = f"restart {self.number} of {most} after {self.who}: {self.cause}"
        text = "; ".join([text, *self.replaced])
        if self.step < 0 or self.is_counted:  # the loss is not known
            return text
        begin = f"from step {self.saved_step}" if self.saved_step >= 0 else "from the beginning"
        begin += ", in memory" if self.is_from_memory else ""
        lost_steps = max(0, self.step - max(0, self.saved_step))  # to be repeated
        return f"{text}; {begin}, {count(lost_steps, 'step')} lost"
