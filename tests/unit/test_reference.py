"""The table of settings, and the files that `make reference` writes from it."""

import re
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path

import pytest

from distributed.network import PROFILES
from docs import reference
from docs.reference import TABLE, VARIABLES, Entry
from launcher.cli.options import COMMANDS, COMMON, TASKS, options_of
from launcher.plan.settings import FILE, in_order
from launcher.plan.typed import Typed

# Fields of `Values` that a command's `finish` replaces by others.
FINISHED = {"rdzv_backend", "rdzv_endpoint", "standalone", "config_path", "config_name"}
FINISHED |= {"test", "json"}


def test_the_files_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("PAGE", "| `GRACE` | 30 |", "| `GRACE` | 60 |"),
        ("PAGE", "| `--via` |", "| `--by` |"),
        ("PAGE", "`GLOO_*`, ", ""),
        ("HELP", "(default: 30)", "(default: 60)"),
        ("HELP", "# Written by", "# By"),
    ],
)
def test_a_file_that_is_not_is_named_then_written_again(
    name: str,
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file: Path = getattr(reference, name)
    text = file.read_text()
    stale = tmp_path / file.name
    assert old in text
    stale.write_text(text.replace(old, new, 1))
    monkeypatch.setattr(reference, name, stale)
    monkeypatch.setattr(reference, "ROOT", tmp_path)

    assert reference.main(["--check"]) == 1
    assert capsys.readouterr().out == f"{file.name} is not up to date; run make reference\n"
    assert reference.main([]) == 0
    assert stale.read_text() == text


def test_the_rest_of_the_page_is_written_by_hand() -> None:
    page = "a\n<!-- make reference: options of run_ddp -->\nold\n<!-- end -->\nb\n"
    first, mark, *rows, end, last = reference.write_page(page).splitlines()
    assert (first, end, last) == ("a", "<!-- end -->", "b") and "run_ddp" in mark
    assert rows[:2] == ["| option | meaning |", "|---|---|"]
    assert rows[2].startswith("| `-n`, `--num-gpus` | number of processes. ")


# --- the table ----------------------------------------------------------------------------------


def commands_named(text: str) -> set[str]:
    return {*re.split(r",\s+", text.removeprefix("all but "))} - {""}


def test_the_table_is_an_ini_file() -> None:
    """configparser refuses what the table's own reader would skip, such as a second entry."""
    parser = ConfigParser(interpolation=None)
    parser.read(FILE)
    assert parser.sections() == [*TABLE]
    for header, setting in TABLE.items():
        commands, names = (", ".join(part) for part in (setting.commands, setting.names))
        assert header == (f"{commands}: {names}" if commands else names)
        for key, text in parser[header].items():
            read = getattr(setting, key)
            assert read == (text if isinstance(read, str) else re.split(r",\s", text)), key


def test_the_comment_at_the_top_says_what_each_key_means() -> None:
    told = FILE.read_text().partition("\n\n")[0]
    keys = re.findall(r"^#   ([a-z_]+(?:, [a-z_]+)*) {2,}", told, re.M)
    known = {field.name for field in fields(Entry)} - {"commands", "names"}
    assert {*", ".join(keys).split(", ")} == known


@pytest.mark.parametrize("header", TABLE)
def test_an_entry_names_what_exists(header: str) -> None:
    setting = TABLE[header]
    assert {*setting.commands} - {""} <= COMMANDS.keys()
    assert commands_named(setting.shown_by) <= COMMANDS.keys()
    assert reference.is_option(setting) or not setting.field or hasattr(Typed, setting.field)
    assert setting.row_below in ("", *TABLE)
    assert not setting.help_below or reference.find_header(setting.help_below)
    assert setting.hidden in ("", "yes") and setting.least.isdecimal() == setting.most.isdecimal()


def test_each_place_is_taken_once() -> None:
    for key in ("resume", "resume_over_ssh", "agent"):
        places = [getattr(VARIABLES[name], key) for name in in_order(key)]
        assert places == [str(number) for number in range(1, len(places) + 1)]


def test_each_option_has_a_field_and_a_row() -> None:
    known = {field.name for field in fields(Typed)} | FINISHED
    for command in COMMANDS:
        for name, option in {**COMMON, **options_of(command)}.items():
            assert option.field in known, name
    for header, setting in TABLE.items():
        assert setting.meaning or header in ("args", "CONFIG", "machines", "logins")


def test_options_of_all_commands_are_not_those_of_some() -> None:
    assert {*COMMON} == {"--dry-run", "--strict", "--show", "--detach"}
    assert {*TASKS.values()} == {"help", "version", "status", "stop", "stacks"}
    for command in COMMANDS:
        assert not options_of(command).keys() & {*COMMON, *TASKS}
    assert options_of("launch_singlenode") == {}


def test_the_words_of_the_profile_are_those_of_nccls_settings() -> None:
    assert [*VARIABLES["NCCL_PROFILE"].words] == [name for name in PROFILES if name]
