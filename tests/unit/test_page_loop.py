"""The loop of docs/your-script.md loses nothing when it is stopped or killed."""

from pathlib import Path

import pytest
from page_loop import PageLoop


@pytest.mark.slow
def test_stopped_and_killed_it_ends_with_the_weights_of_an_unbroken_run(tmp_path: Path) -> None:
    loop = PageLoop(tmp_path, 2)
    for how in ("stop", "kill a rank"):
        loop.interrupt("broken", how, after_s=0.3)
    assert loop.finish("broken") == loop.finish("whole")
