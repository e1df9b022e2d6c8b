from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from campaigns.durability import simulator
from rlhf_core.stage import checkpoints
from rlhf_core.stage.checkpoints import Checkpoints
from rlhf_core.store import layout

finish = Checkpoints._finish


def old_checkpoints_first(saved: Checkpoints, *args: Any) -> None:
    for folder in saved._folders():
        layout.remove_tree(folder)
    finish(saved, *args)


def sealed_unseen(folder: Path, noted: dict[str, Any]) -> None:
    layout.write_json(folder / checkpoints._STATE, noted)
    layout.write_json(folder / checkpoints._COMPLETE, {"sizes": {}})


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "checkpoints are sealed before they are on the disk": (checkpoints, "_seal", sealed_unseen),
    "old checkpoints are removed first": (Checkpoints, "_finish", old_checkpoints_first),
}
"""Mechanisms outside the protocol of the store, whose own are in `tests/rlhf_core/store/test_histories.py`."""


def test_no_history_breaks_a_promise():
    campaign = simulator.play(range(200))
    assert campaign.broken == {}
    assert {fault for _, fault in campaign.struck.elements()} == set(simulator.FAULTS)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_a_promise_rests_on_is_missed_within_1000_histories(mutant):
    with mock.patch.object(*MUTANTS[mutant]):
        assert simulator.play(range(1000), until_broken=True).broken


def test_a_history_follows_from_its_seed():
    first, second = (simulator.play(range(20)) for _ in range(2))
    assert (first.operations, first.struck) == (second.operations, second.struck)
