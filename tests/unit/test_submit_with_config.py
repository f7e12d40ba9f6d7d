"""What scripts/submit_with_config.sh asks SLURM for; whole submissions are in tests/cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.plan.submit_with_config import (
    OWN,
    Size,
    choose_preparation,
    choose_size,
    read_sinfo,
    submit_all,
    take_own_settings,
)
from launcher.plan.typed import Typed
from launcher.text import PlanError

OURS = ("config=c.yaml", "num_gpus_train=2")


def own_of(**given: str) -> dict[str, str]:
    return {**dict.fromkeys(OWN, ""), **given}


@pytest.mark.parametrize(
    ("gpus", "nodes", "expected"),
    [
        (4, [8] * 20, Size(1, 4, is_exclusive=False)),
        (8, [8] * 20, Size(1, 8, is_exclusive=True)),
        (12, [8] * 20, Size(2, 6, is_exclusive=False)),
        (16, [8] * 20, Size(2, 8, is_exclusive=True)),
        (11, [8] * 20, Size(11, 1, is_exclusive=False)),
        (3, [1] * 3, Size(3, 1, is_exclusive=True)),
        (16, [8, 4, 4, 4], Size(4, 4, is_exclusive=False)),  # one node is greater than the others
        (8, [8, 4, 4, 4], Size(1, 8, is_exclusive=True)),
        (64, [8, 4], Size(8, 8, is_exclusive=True)),  # more than there are
    ],
)
def test_as_few_nodes_as_share_the_gpus_evenly(gpus: int, nodes: list[int], expected: Size) -> None:
    assert choose_size(gpus, nodes) == expected


def test_gpus_of_any_type_of_the_partition_that_the_job_goes_to() -> None:
    default = "gpu* n1 gpu:a100:4(S:0-1),gpu:h100:2\ngpu* n2 gpu:8\ngpu* n3 (null)\n"
    assert read_sinfo(f"big n4 gpu:16\n{default}", of_default=True) == [6, 8]
    assert read_sinfo(f"big n4 gpu:16\nbig n1 gpu:6\n{default}", of_default=False) == [16, 6, 8]
    assert read_sinfo("big n1 gpu:16\nbig n2 gpu:16\n", of_default=True) == [16, 16]
    assert read_sinfo("cpu* n1 (null)\n", of_default=True) == []


def test_settings_of_the_submission_and_of_the_training() -> None:
    given = (*OURS, "seed=3", "train.max_steps=5", "mem=4G")
    own, others = take_own_settings(Typed("submit", setting=given), {})
    assert own == own_of(config="c.yaml", num_gpus_train="2", mem="4G")
    assert others == ["seed=3", "train.max_steps=5"]
    typed = Typed("submit", setting=(*OURS, "whatever=1"))
    assert take_own_settings(typed, {"TRAIN_SCRIPT": "own.py"})[1] == ["whatever=1"]


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (("config=c.yaml",), "no num_gpus_train; usage: x.sh ..."),
        (("num_gpus_train=2",), "no config; usage: x.sh ..."),
        ((*OURS, "partitoin=a"), "unknown setting 'partitoin'; did you mean partition? known here"),
        ((*OURS, "num_gpus=x"), "num_gpus is 'x'; give a whole number from 0"),
    ],
)
def test_wrong_settings(settings: tuple[str, ...], cause: str) -> None:
    with pytest.raises(PlanError) as raised:
        take_own_settings(Typed("submit", setting=settings, usage="x.sh ..."), {})
    assert cause in str(raised.value)


def test_the_script_that_prepares_is_typed_or_the_configs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = own_of(num_gpus="8", prepare="typed.sh")
    assert choose_preparation(own, "config.sh", "x.sh") == "typed.sh"
    assert choose_preparation(own_of(num_gpus="8"), "config.sh", "x.sh") == "config.sh"
    assert choose_preparation(own_of(), "", "x.sh") == "" == capsys.readouterr().err
    assert choose_preparation(own_of(num_gpus="8"), "", "x.sh") == ""
    err = capsys.readouterr().err
    assert err.startswith("x.sh: warning: num_gpus is for a script that prepares the training, ")
    assert err.endswith("; only the training is submitted\n")


def test_a_chain_cannot_be_waited_for() -> None:
    with pytest.raises(PlanError, match="--wait follows one job"):
        take_own_settings(Typed("submit", setting=(*OURS, "chain=2"), wait=True), {})


def test_other_options_of_sbatch_are_passed_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.plan.submit_with_config.refusal", lambda words: "")
    passed = ("--mail-user", "me@here", "--constraint", "a100&ib")
    typed = Typed("submit", here=Path("/home/own"), passed=passed, is_dry_run=True)  # behind a link
    own = own_of(config="c.yaml", partition="gpu")
    assert submit_all(typed, own, Size(1, 2, is_exclusive=False), ["x.sh"], chain="") == 0
    told = "--partition=gpu --chdir=/home/own --mail-user=me@here '--constraint=a100&ib' x.sh"
    assert f"sbatch --parsable {told}" in capsys.readouterr().err
