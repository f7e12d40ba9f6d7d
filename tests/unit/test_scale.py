"""What node rank 0 and a launcher send, open and print in a run of many nodes.

bench/scale.py measures their processor time.
"""

import html
import re

import pytest
import scale_agent
import scale_alone
import scale_picture
import scale_ssh
from agents import rarely
from scale_nodes import NPROC

pytestmark = pytest.mark.slow
SIZES = [64, *rarely(256, 1024)]


@pytest.mark.parametrize("number", SIZES)
def test_if_all_ranks_fail_each_node_is_told_once(number: int) -> None:
    with scale_agent.started(number) as agent:
        files = agent.count_files()
        scale_agent.fail_all(agent)
        code, err = agent.finish()
    assert agent.nodes.received["EndRanks"] == agent.nodes.received["Verdict"] == number - 1
    assert files < number + 40
    assert code == 7 and "FAILED   rank 1 (" in err, err


@pytest.mark.parametrize("number", SIZES)
def test_a_failure_is_told_although_all_ranks_are_connected(number: int) -> None:
    """With 8 ranks on each node; the soft limit of open files is 1,024, as on most systems."""
    with scale_agent.started(number) as agent:
        ranks = scale_agent.connect_ranks(agent)
        scale_agent.fail_one(agent)
        code, err = agent.finish()
    assert len(ranks) == NPROC * (number - 1)
    failed = agent.nodes.ranks_of(2)[0]
    assert code == 7 and f"FAILED   rank {failed} (local rank 0, node2)" in err, err


@pytest.mark.parametrize("number", SIZES)
def test_a_lost_node_is_named(number: int) -> None:
    with scale_agent.started(number) as agent:
        scale_agent.lose_one(agent)
        code, err = agent.finish()
    assert code == 137 and "node2" in err and "[agent-killed]" in err, err


@pytest.mark.parametrize("number", SIZES)
def test_a_hang_is_one_short_block(number: int) -> None:
    with scale_agent.started(number) as agent:
        scale_agent.hang(agent)
        code, err = agent.finish()
    stacks = re.findall(r"^stacks   (.*)$", err, re.M)
    last = (number - 1) * NPROC
    assert stacks[0] == f"ranks 1-{last}: train.py:9 in step < train.py:31 in main"
    assert len(stacks) <= 2 and code == 7, err


@pytest.mark.parametrize("number", SIZES)
def test_a_stop_reaches_all_nodes(number: int) -> None:
    with scale_agent.started(number) as agent:
        scale_agent.stop(agent)
        _, err = agent.finish()
    assert agent.nodes.received["StopRequest"] == number - 1
    assert re.search(rf"^stopped  .*ranks 1-{(number - 1) * NPROC} saved", err, re.M), err


@pytest.mark.parametrize("number", SIZES)
def test_a_launcher_over_ssh_opens_four_files_for_each_node(number: int) -> None:
    with scale_ssh.launched(number) as launcher:
        scale_ssh.start(launcher)
        files = launcher.count_files()
        before = launcher.far.received["StopRequest"]
        text = scale_ssh.stop(launcher)
    assert 4 * number < files < 4 * number + 20
    assert (before, launcher.far.received["StopRequest"]) == (0, number)
    assert re.search(r"^stopped  by SIGTERM after saving a checkpoint", text, re.M), text
    assert launcher.process.returncode == 75


def test_the_picture_is_that_of_the_recorded_tables() -> None:
    """`python bench/scale_picture.py` draws it again."""
    picture = html.unescape(scale_picture.PICTURE.read_text(encoding="utf-8"))
    assert scale_picture.about() in picture
    for program, events in scale_picture.curves().items():
        assert all(f">{text}<" in picture for text in (program, *events))


def test_the_self_test_is_measured_with_one_slow_node() -> None:
    measured = dict(scale_alone.measure_selftest(8))
    assert [*measured] == ["pairs in rounds", "read all links, find slow ones"]
