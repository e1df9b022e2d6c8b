import json

import pytest

from pipelines.cli.accounts import moment
from pipelines.cli.main import main
from pipelines.execution.run import billed
from pipelines.flows.profile import load_profile
from pipelines.flows.run_rules import ProjectConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from tests.support.records import commit_text
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec


@pytest.fixture(autouse=True)
def _of_ada(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLHF_USER", "ada")


def _json(capsys, *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_usage_sums_hours_times_cpus_and_gpus_by_user_and_project(store, capsys):
    hour = {"seconds": 3600.0, "started": "2030-01-02T10:00:00.000+00:00"}
    commit_text(store, "1", user="ada", project="bot", cpus=3.0, gpus=2.0, **hour)
    commit_text(store, "2", user="ada", project="bot", cpus=1.0, **hour)
    commit_text(store, "3", user="ben", **hour)
    commit_text(store, "4", user="ben", **(hour | {"started": "2029-12-31T10:00:00.000+00:00"}))
    where = ["--store", str(store.root), "--since", "2030-01-01"]
    (bot, other) = _json(capsys, "usage", *where)["usage"]  # type: ignore[misc]
    assert bot == {
        "group": {"user": "ada", "project": "bot"}, "results": 2, "hours": 2.0, "cpu_hours": 4.0, "gpu_hours": 2.0,
    }  # fmt: skip
    assert (other["group"], other["results"], other["cpu_hours"]) == ({"user": "ben", "project": "-"}, 1, 0.0)
    assert main(["usage", *where, "--by", "day"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["2030-01-02", "3", "3.00", "4.00", "2.00"]


@pytest.mark.parametrize("text", ["2030-01-02T00:30:00+01:00", "2030-01-01T23:30:00", "2030-01-01T23:30:00Z"])
def test_a_time_with_an_offset_is_converted_to_utc(text):
    assert moment(text) == "2030-01-01T23:30:00+00:00"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--by", "usr", "--by = 'usr': is none of user, project"),
        ("--by", "day,user,day", "--by = 'day,user,day': names a field twice"),
        ("--since", "soon", "--since = 'soon': is neither"),
        ("--since", "\N{ARABIC-INDIC DIGIT THREE}d", "--since = '\N{ARABIC-INDIC DIGIT THREE}d': is neither"),
    ],
)
def test_a_group_or_a_time_that_there_is_not_is_refused(store, capsys, option, value, message):
    assert main(["usage", "--store", str(store.root), option, value]) == 2
    assert message in capsys.readouterr().err


def test_a_name_in_a_store_that_others_write_controls_no_terminal_and_no_line(store, capsys):
    commit_text(store, "1", user="eve\x1b[31m\nroot", started="2030-01-02T10:00:00.000+00:00")
    assert main(["usage", "--store", str(store.root), "--since", "2030-01-01"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["eve�[31m�root", "-", "1", "0.00", "0.00", "0.00"]


def test_a_time_without_results_and_deeds_is_said_with_the_store(store, capsys):
    for command, said in (("usage", "has no results since "), ("audit", ", and no champion changed")):
        assert main([command, "--store", str(store.root), "--since", "1h"]) == 0
        [line] = capsys.readouterr().out.splitlines()
        assert f"the store {store.root}" in line and said in line


def test_audit_lists_pins_collections_and_decisions_with_who_and_why(store, capsys):
    ref, where = commit_text(store, "1"), ["--store", str(store.root)]
    asked = GateDecisions(store.shared).ask(Question(gate="quality", condition={}, digest="d1"), run="night", links={})
    GateDecisions(store.shared).decide(asked, "approve", reason="good", by="ben")
    assert main(["store", "pin", ref.digest, "--note", "for the paper", *where]) == 0
    assert main(["store", "unpin", ref.digest, *where]) == 0
    (store.root / "quarantine" / "old").mkdir(parents=True)
    assert main(["store", "gc", "--dry-run", "--keep-days", "0", *where]) == 0
    assert main(["store", "gc", "--keep-days", "0", *where]) == 0
    found = _json(capsys, "audit", *where)["audit"]
    assert isinstance(found, list)
    said = {(one["by"], one["did"], one["to"], one["why"]) for one in found}
    assert {("ada", "pin", ref.digest, "for the paper"), ("ada", "unpin", ref.digest, "")} < said
    assert ("ben", "approve", "quality d1", "good") in said
    assert [one["by"] for one in found if one["did"] == "gc"] == ["ada"], "a dry run did nothing"
    assert [one["at"] for one in found] == sorted((one["at"] for one in found), reverse=True)


def test_a_project_names_the_experiment_the_tag_and_the_record_and_no_key(tmp_path):
    plain = load_profile(write_mini(tmp_path))
    with pytest.raises(
        ValueError, match=r"keep_days = 0: is of no project; add name"
    ):  # or all projects' results would go
        ProjectConfig(keep_days=0)
    named = plain.model_copy(update={"project": ProjectConfig(name="bot")})
    assert (plain.experiment, named.experiment) == (plain.name, f"bot/{plain.name}")
    assert (plain.project.tags, named.project.tags) == ((), ("project:bot",))
    spec = billed(toy_spec(ToyConfig()), named.model_copy(update={"runtime": RuntimeConfig(train_workers=2)}))
    assert (spec.project, spec.cpus, spec.gpus) == ("bot", 1.0, 0.0), "the toy stage has no engines"
