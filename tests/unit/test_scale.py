"""What node rank 0 sends, opens and prints in a run of many nodes; bench/scale.py measures it."""

import os
import re

import pytest
import scale
from agents import rarely
from scale_nodes import NPROC

pytestmark = pytest.mark.slow
SIZES = [64, *rarely(256)]


@pytest.mark.parametrize("number", SIZES)
def test_if_all_ranks_fail_each_node_is_told_once(number: int) -> None:
    with scale.started(number) as agent:
        files = len(os.listdir(f"/proc/{agent.pid}/fd"))
        scale.fail_all(agent)
        code, err = agent.finish()
    assert agent.nodes.received["EndRanks"] == agent.nodes.received["Verdict"] == number - 1
    assert files < number + 40
    assert code == 7 and "FAILED   rank 1 (" in err, err


@pytest.mark.parametrize("number", SIZES)
def test_a_hang_is_one_short_block(number: int) -> None:
    with scale.started(number) as agent:
        scale.hang(agent)
        code, err = agent.finish()
    stacks = re.findall(r"^stacks   (.*)$", err, re.M)
    last = (number - 1) * NPROC
    assert stacks[0] == f"ranks 1-{last}: train.py:9 in step < train.py:31 in main"
    assert len(stacks) <= 2 and code == 7, err


@pytest.mark.parametrize("number", SIZES)
def test_a_stop_reaches_all_nodes(number: int) -> None:
    with scale.started(number) as agent:
        scale.stop(agent)
        _, err = agent.finish()
    assert agent.nodes.received["StopRequest"] == number - 1
    assert re.search(rf"^stopped  .*ranks 1-{(number - 1) * NPROC} saved", err, re.M), err
