"""What a node writes to stdout: output, and messages among it, however they are cut."""

from __future__ import annotations

import os

import pytest

from launcher.wire.launcher_link import BEGIN, LONGEST_MESSAGE, Answers, read_request, tell
from launcher.wire.messages import Exit, Ready, StopRequest, Sweep

TOKEN = "0f" * 16
READY, EXIT = b'{"Ready":{}}', b'{"Exit":{"code":3,"left":0}}'


def read(pieces: list[bytes]) -> tuple[bytes, list[tuple[int, object]]]:
    answers, output, told = Answers(TOKEN), b"", []
    for piece in (*pieces, b""):
        text, came = answers.read(piece)
        output += text
        told += came
    return output, told


def told_by(node: int, capfd: pytest.CaptureFixture[str], message: object = None) -> list[bytes]:
    """Return the lines in which a node tells it."""
    tell(f"{TOKEN}.{node}", message)
    return capfd.readouterr().out.encode().splitlines(keepends=True)


@pytest.mark.parametrize("size", range(1, 120))
def test_messages_are_found_wherever_they_are_cut(size: int) -> None:
    mark, no = f"{BEGIN}{TOKEN}.7 ".encode(), f"{BEGIN}{TOKEN}.x no\n".encode()
    text = b"a\n" + mark + READY + b"\nhalf a line" + mark + EXIT + b"\n" + no + b"rest \x020f\x02"
    output, told = read([text[at : at + size] for at in range(0, len(text), size)])
    assert told == [(7, Ready()), (7, Exit(3, 0))]
    assert output == b"a\nhalf a line" + no + b"rest \x020f\x02"


@pytest.mark.parametrize("size", range(1, 200, 3))
def test_a_long_message_comes_in_lines_among_those_of_others(
    size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    sent = {node: Sweep(f"{node}" * 2000) for node in (1, 2)}
    first, second = (told_by(node, capfd, message) for node, message in sent.items())
    (beat,) = told_by(1, capfd)
    assert len(first) > 2 and max(map(len, first)) < 1024  # so much srun keeps together
    mixed = [line for pair in zip(second, first, strict=True) for line in (b"out", *pair, beat)]
    text = b"".join(mixed)
    output, told = read([text[at : at + size * 9] for at in range(0, len(text), size * 9)])
    assert [(node, message) for node, message in told if message] == [(2, sent[2]), (1, sent[1])]
    assert output == b"out" * len(first)


def test_what_is_no_message_is_output(capfd: pytest.CaptureFixture[str]) -> None:
    lines = told_by(1, capfd, Sweep("x" * 2000))
    for wrong in (b'{"Exit":{"code":3}}', b'{"Other":{}}', b"no message"):
        line = f"{BEGIN}{TOKEN}.1 ".encode() + wrong + b"\n"
        assert read([line]) == (line, [])
        output, told = read([*lines[:2], line])  # it is not all there
        assert output == line and not any(message for _, message in told)


def test_a_launchers_messages_are_read_one_at_a_time() -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b'\n\n{"StopRequest":{"signum":15}}\n{"Sweep":{"token":"t"}}\nno message\nx')
    assert read_request(ours) == StopRequest(15)
    assert read_request(ours) == Sweep("t")
    assert read_request(ours) is None
    assert os.read(ours, 9) == b"x"
    os.close(theirs)
    assert read_request(ours) is None
    os.close(ours)


def test_output_that_begins_like_a_message_is_held_up_no_longer_than_that() -> None:
    answers = Answers(TOKEN)
    assert answers.read(b"step 0f0") == (b"step 0f0", [])
    assert answers.read(b"\x020f") == (b"", [])
    assert answers.read(b" done") == (b"\x020f done", [])


def test_a_message_without_end_takes_no_memory() -> None:
    answers = Answers(TOKEN)
    answers.read(f"{BEGIN}{TOKEN}.0 ".encode())
    for _ in range(3 * LONGEST_MESSAGE // 65536):
        answers.read(b"x" * 65536)
        assert len(answers._text) <= LONGEST_MESSAGE
