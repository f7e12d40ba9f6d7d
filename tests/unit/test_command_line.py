"""Where torchrun's options end, and that no parser sees what follows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from launcher.agent.command_line import find_option, read_for_torch, split
from launcher.agent.torchrun_arguments import parse

HELP = (Path(__file__).parents[2] / "scripts/lib/help.txt").read_text()
LIKE_TORCHRUNS = [
    *("--log", "--n", "--m", "--max", "--node", "--local", "--run", "--start", "--r", "--no", "-m"),
    *("--nnodes=7", "--node-rank", "--", "-h", "--help", "$$5", "${local_rank}", "$HOME", ""),
]


@pytest.mark.parametrize(
    ("options", "program"),
    [
        ([], ["x.py"]),
        ([], []),
        ([], ["-"]),
        (["--nproc-per-node", "2"], ["x.py", "--log", "x"]),
        (["--nproc_per_node=2", "--standalone"], ["x.py", "--", "y"]),
        (["--standalone", "--no_python"], ["bash", "-c", "true"]),
        (["--stand", "-m"], ["pkg.mod", "-m", "x"]),
        (["--virtual_local_rank", "--run-path", "--use-env"], ["x.py"]),
        (["-r", "3", "-t3", "--node-rank", "-1"], ["x.py"]),
        (["--role", "--module"], ["x.py"]),
    ],
)
def test_where_the_program_begins(options: list[str], program: list[str]) -> None:
    assert split([*options, *program]) == (options, program)


def test_two_dashes_end_the_options() -> None:
    assert split(["--standalone", "--", "x.py", "--", "y"]) == (
        ["--standalone"],
        ["x.py", "--", "y"],
    )


def test_an_option_is_not_taken_from_the_program() -> None:
    words = ["--node_rank=1", "--node-r", "2", "x.py", "--node-rank", "3"]
    assert find_option(words, "--node-rank") == "2"
    assert find_option(words, "--signals-to-handle") == ""


@pytest.mark.parametrize("word", LIKE_TORCHRUNS)
def test_arguments_reach_the_program_unchanged(word: str) -> None:
    args, _ = parse(["--nproc-per-node", "1", "x.py", word, "y"])
    assert (args.program.name, args.program.arguments) == ("x.py", (word, "y"))
    assert (args.num_nodes, args.node_rank) == (1, 0)


def test_torch_takes_arguments_for_templates() -> None:
    args = read_for_torch(
        torchrun.parse_args, ["--nnodes=1:2", "x.py", "--log", "$$5", "${local_rank}"]
    )
    assert args.training_script_args == ["--log", "$$$$5", "$${local_rank}"]


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = parse(["x.py"])
    names = re.findall(r"\b[A-Z][A-Z_]+\b", "".join(re.findall(r"(?m)^  [A-Z].*?(?:  |$)", HELP)))
    assert {"GRACE", "SPARES", "VENV", "NO_COLOR"} < {*names}
    for name in names:
        monkeypatch.setenv(name, "")
    assert parse(["x.py"]) == usual
