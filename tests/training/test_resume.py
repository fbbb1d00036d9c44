"""What a checkpoint of an asynchronous run holds besides arrays, and that a resumed run goes on with it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl.config import load
from jaxrl.feed.reader import read_events
from jaxrl.runs import open_run
from tests.training.test_stepping import groups_of


def fake_learner(version: int) -> Any:
    return SimpleNamespace(
        version=version,
        state=lambda: {"params": {"w": np.arange(4.0)}},
        load=lambda state, version: None,
    )


def test_finished_groups_and_ages_come_back(tmp_path: Path) -> None:
    groups = groups_of(3)
    with open_run(tmp_path, load(), fake_learner(5)) as opened:
        opened.ages = {0: 40, 2: 2}
        opened.save(4, 12, fake_learner(5), groups=groups)
    with open_run(tmp_path, load(), fake_learner(0)) as opened:
        assert (opened.step, opened.cursor, opened.fresh, opened.ages) == (4, 12, False, {0: 40, 2: 2})
        assert [group.task for group in opened.groups] == [group.task for group in groups]
        pairs = zip(groups[2].trajectories, opened.groups[2].trajectories, strict=True)
        assert all(np.array_equal(one.versions, other.versions) for one, other in pairs)
    assert [row["groups"] for row in read_events(tmp_path, "checkpoint")] == [3]


def test_damaged_groups_cost_the_checkpoint_that_holds_them(tmp_path: Path) -> None:
    with open_run(tmp_path, load(), fake_learner(1)) as opened:
        opened.save(1, 4, fake_learner(1))
        opened.save(2, 8, fake_learner(2), groups=groups_of(2))
        newest = opened.store.paths()[-1] / "files/groups.npz"
    newest.write_bytes(newest.read_bytes()[:-1])
    with open_run(tmp_path, load(), fake_learner(0)) as opened:
        assert (opened.step, opened.cursor, opened.groups, opened.damaged) == (1, 4, [], 1)
    [alert] = read_events(tmp_path, "alert")
    assert "groups.npz" in alert["reason"]
