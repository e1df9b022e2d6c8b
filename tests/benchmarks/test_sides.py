import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.sides import Root, Side, share_of_even

PROGRAM = """
from benchmarks.sides import root

def work(job, turn):
    print("chatter of a library")
    if job["dies"]:
        raise ValueError("out of luck")
    made = []
    def step():
        made.append(job["value"])
        return {"sum": sum(made)}
    turn.serve(step, last=lambda: 7.0)

root(work)
"""


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    one = Root([sys.executable, "-c", PROGRAM], tmp_path / "root.log")
    yield one
    one.close()


def test_sides_take_turns_and_keep_what_is_theirs(root: Root, tmp_path: Path) -> None:
    two, three = (
        Side(f"side {value}", root, {"dies": False, "value": value, "engine": "none"}, tmp_path) for value in (2, 3)
    )
    assert (two.wait(), three.wait()) == ({"sum": 2}, {"sum": 3})
    made = [two.step(), three.step(), two.step()]
    assert [one["sum"] for one in made] == [4, 6, 6]
    assert all(one["wall"] >= 0 and one["cpu"] >= 0 for one in made)
    last = two.stop()
    assert last["last"] == 7.0
    assert 0.001 < last["peak_gib"] < 4
    three.stop()


def test_a_side_that_dies_is_reported_with_its_log(root: Root, tmp_path: Path) -> None:
    side = Side("a side", root, {"dies": True}, tmp_path)
    with pytest.raises(SystemExit, match=r"(?s)a side died.*chatter of a library.*out of luck"):
        side.wait()


def test_the_reward_is_the_share_of_even_ids() -> None:
    assert share_of_even([2, 3, 4, 4]) == 0.75
    assert share_of_even([]) == 0
