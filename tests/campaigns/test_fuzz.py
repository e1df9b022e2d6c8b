"""A quick selection of damaged inputs, and that the fuzzer sees what it is there to see. 10,000 of each: `python -m campaigns.fuzz`."""

import random
from importlib import import_module
from pathlib import Path

import pytest

from campaigns.fuzz.campaign import Wrong, run
from rlhf_core.errors import ConfigError

LIMIT_S = 10.0


@pytest.mark.parametrize(("name", "count"), [("profiles", 300), ("rows", 200), ("scripts", 200), ("store", 30)])
def test_damaged_inputs_lead_to_clear_errors_or_right_results(name, count, monkeypatch, tmp_path):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path))
    target = import_module(f"campaigns.fuzz.{name}").Target
    results = list(run(name, target, seed=0, first=0, count=count, limit_s=LIMIT_S))
    assert [one.detail for one in results if one.where] == []
    fates = {one.fate for one in results}
    assert fates == {"clear error", "right"}  # not so damaged that all are refused, nor so little that none is


class Made:
    """Fails in a way of its own for each number that it draws."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attempt(self, rng: random.Random) -> None:
        match rng.randrange(5):
            case 0:
                raise ConfigError("name = 'x': no; mend it")
            case 1:
                raise KeyError("x")
            case 2:
                raise Wrong("a row is missing")
            case 3:
                while True:
                    pass


def test_the_fuzzer_tells_errors_from_tracebacks_wrong_results_and_hangs():
    results = list(run("made", Made, seed=3, first=0, count=12, limit_s=0.1))
    drawn = [random.Random(f"made/3/{number}").randrange(5) for number in range(12)]
    fates = ("clear error", "traceback", "traceback", "hang", "right")
    assert [one.fate for one in results] == [fates[one] for one in drawn]
    assert set(drawn) == {0, 1, 2, 3, 4}
    wheres = {one.where.partition(" at ")[0] for one in results}
    assert wheres == {"", "KeyError", "Wrong", "_Late"}
