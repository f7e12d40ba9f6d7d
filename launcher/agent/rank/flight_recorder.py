"""Write a rank's collectives, from torch's flight recorder, to a file when its agent asks.

https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from launcher.agent.diagnosis.collectives import DUMP_SIGNAL, file_of, newest
from launcher.agent.torch_internals import recorders
from launcher.typed_json import encode
from launcher.wire.states import Collective

DEFAULT_SIZE = 2000  # calls that the recorder keeps; set only if torch has NCCL


def answer_requests(error_file: Path) -> None:
    """In a rank that records collectives, start a thread that answers the agent's requests.

    A thread does this because the main thread may be waiting in a collective, where it cannot
    handle a signal. Blocks DUMP_SIGNAL, by which the agent recognizes a rank that can answer.
    """
    file = file_of(error_file)
    signal.pthread_sigmask(signal.SIG_BLOCK, {DUMP_SIGNAL})  # in all threads
    threading.Thread(target=_answer, args=(file,), name="flight recorder", daemon=True).start()


def _answer(file: Path) -> None:
    new = file.with_suffix(".new")
    while signal.sigwait({DUMP_SIGNAL}):
        with contextlib.suppress(OSError):  # a full disk
            new.write_text(encode(newest(_read_collectives())))
            new.replace(file)


def _read_collectives() -> Iterator[Collective]:
    """Yield the collectives that torch has recorded, without calls between two ranks.

    Reads the format that torch 2.6 and newer write.
    """
    for dump in recorders:
        for entry in json.loads(dump() or "{}").get("entries", ()):
            if entry["is_p2p"]:  # only two ranks of the group take part
                continue
            number, name = entry["process_group"]
            types = ", ".join(entry["input_dtypes"])
            yield Collective(
                group=name if name not in ("", "undefined") else f"group {number}",
                number=entry["collective_seq_id"],
                operation=entry["profiling_name"].rpartition(":")[2],
                sizes=f"{', '.join(map(str, entry['input_sizes']))} {types}".strip(),
                is_done=entry["retired"] or entry["state"] == "completed",
            )
