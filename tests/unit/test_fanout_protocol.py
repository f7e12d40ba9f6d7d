"""What a node writes to stdout: output, and messages among it, however they are cut."""

from __future__ import annotations

import pytest

from launcher.fanout.protocol import LONGEST_MESSAGE, Answers, Exit, Ready, beat_line

TOKEN = "0f" * 16 + ".0"
READY, EXIT = b'{"ready":{}}', b'{"exit":{"code":3,"left":0}}'


def read(pieces: list[bytes]) -> tuple[bytes, list[object]]:
    answers, output, messages = Answers(TOKEN), b"", []
    for piece in (*pieces, b""):
        text, came = answers.read(piece)
        output += text
        messages += came
    return output, messages


@pytest.mark.parametrize("size", range(1, 120))
def test_messages_are_found_wherever_they_are_cut(size: int) -> None:
    mark = TOKEN.encode() + b" "
    text = b"a\n" + mark + READY + b"\nhalf a line" + mark + EXIT + b"\n" + mark + b"no\nrest 0f0"
    output, messages = read([text[at : at + size] for at in range(0, len(text), size)])
    assert messages == [Ready(), Exit(3, 0)]
    begins = [text.find(mark), text.find(mark, 10)]
    if all((at + more) % size for at in begins for more in (1, 2, 3)):  # else these are shown
        assert output == b"a\nhalf a line" + mark + b"no\nrest 0f0"


@pytest.mark.parametrize("size", range(1, 200, 3))
def test_a_sign_of_life_may_come_within_a_message(size: int) -> None:
    beat, mark = beat_line(TOKEN), TOKEN.encode() + b" "
    text = beat + b"out" + beat + mark + EXIT[:9] + beat + EXIT[9:] + b"\nput" + beat
    output, messages = read([text[at : at + size] for at in range(0, len(text), size)])
    assert messages == [Exit(3, 0)]
    assert output.replace(b"0f", b"").replace(b"0", b"") in (b"output", b"outfput")


def test_output_that_begins_like_a_message_is_not_held_up() -> None:
    answers = Answers(TOKEN)
    assert answers.read(b"step 0f0") == (b"step 0f0", [])
    assert answers.read(b"f0f0") == (b"", [])
    assert answers.read(b" done") == (b"f0f0 done", [])


def test_a_message_without_end_takes_no_memory() -> None:
    answers = Answers(TOKEN)
    answers.read(TOKEN.encode() + b" ")
    for _ in range(3 * LONGEST_MESSAGE // 65536):
        answers.read(b"x" * 65536)
        assert len(answers._text) <= LONGEST_MESSAGE
