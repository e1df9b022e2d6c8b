"""Two artifacts, profiles or runs, compared."""

from dataclasses import replace
from typing import Any

import pytest

from pipelines.cli.diff_verb import _print_stages
from pipelines.cli.main import EXIT_REFUSED, main
from pipelines.execution.diff import (
    AnswerPair,
    Difference,
    Side,
    config_differences,
    different_answers,
    first_difference,
    metric_differences,
    not_compared,
    of_artifact,
    of_planned,
    of_record,
    side_of,
    stage_differences,
)
from pipelines.execution.plan import PlannedStage
from pipelines.execution.summary import Measure
from rlhf_core.data.shards import write_generations, write_index
from rlhf_core.stage.decision import Decision
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import remove_tree
from rlhf_core.types import ArtifactRef, Completion, Generation, GenerationsRef, Message, PolicyRef, Prompt
from tests.support.records import commit, provenance
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import toy_spec

CODE = {"stages.ppo.run": "c1", "rlhf_core.training.fit": "c2"}


class Made:
    """Artifacts of stages that were never run, each from those before it."""

    def __init__(self, store: ArtifactStore) -> None:
        self.store = store
        self.count = 0

    def commit(
        self, label: str, config: dict[str, Any], parent: ArtifactRef | None, kind: type[Any] = PolicyRef, **more: Any
    ) -> Any:
        self.count += 1
        out = self.store.root.parent / f"out-{self.count}"
        out.mkdir()
        rows = more.pop("rows", None)
        if rows is None:
            (out / "weights.txt").write_text(f"{label} {config} {parent and parent.digest}")
        else:
            write_generations(out, 0, rows)
            write_index(out, {"policy": "x"})
        payload = {
            "schema": 1, "stage": label, "version": 1, "config": config, "seed": 17, "engines": {}, "callables": {},
            "inputs": {} if parent is None else {"policy": parent.digest},
        }  # fmt: skip
        facts = provenance(label=label, stage=label, payload=payload, **{"code": CODE, **more})
        parents = () if parent is None else (parent.digest,)
        return commit(self.store, f"{self.count:064d}", out, kind, children={}, record=facts, parents=parents)


def said(*texts: str) -> list[Generation]:
    return [
        Generation(
            Prompt(f"p{number}", (Message("user", f"Question {number}?"),), "", "world"),
            (1,),
            Completion((5,), (-0.1,), text, "stop", 0, 1),
        )
        for number, text in enumerate(texts)
    ]


@pytest.fixture
def two(store: ArtifactStore) -> tuple[str, str]:
    """Return the digests of two policies whose SFT had another rate, with their answers in the store."""
    made, digests = Made(store), []
    for rate, accuracy, third in ((0.1, 0.5, "No."), (0.2, 0.75, "Never.")):
        sft = made.commit("sft", {"rate": rate, "loop": {"epochs": 1}}, None)
        code = CODE | ({"stages.ppo.run": "c9"} if rate == 0.2 else {})
        metrics = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1, "same": 1.0}
        ppo = made.commit("ppo", {"kl_coef": 0.05}, sft, code=code, metrics=metrics, environment={"torch": f"2.{rate}"})
        made.commit("evaluate/ppo/generate", {}, ppo, GenerationsRef, rows=said("Yes.", "Yes.", third))
        digests.append(ppo.digest)
    return digests[0], digests[1]


def test_artifacts_differ_by_the_first_stage_that_was_run_otherwise(store, two):
    ours, theirs = (of_artifact(digest, store) for digest in two)
    found = stage_differences(ours, theirs)
    first = first_difference(found)
    assert first == Difference("sft", ("sft.rate: 0.1 -> 0.2",)) == found[0]
    assert found[1].label == "ppo"
    assert found[1].own == ("code (not in the key): stages.ppo.run", "torch: 2.0.1 -> 2.0.2")
    (given,) = found[1].inputs
    assert given.startswith("input policy changed: ")
    assert stage_differences(ours, ours) == [] and first_difference([]) is None


def test_only_metrics_that_differ_are_compared_with_their_intervals(store, two):
    ours, theirs = (of_artifact(digest, store) for digest in two)
    (accuracy,) = metric_differences(ours, theirs)
    assert accuracy == ("ppo: accuracy", Measure(0.5, 0.4, 0.6), Measure(0.75, 0.65, 0.85))


def test_answers_to_the_same_prompts_stand_side_by_side_where_they_differ(store, two):
    ours, theirs = (of_artifact(digest, store) for digest in two)
    assert different_answers(ours, theirs, 3) == [AnswerPair("Question 2?", "No.", "Never.")]
    assert different_answers(ours, theirs, 0) == different_answers(ours, ours, 3) == []


def test_an_earlier_policy_does_not_answer_for_one_that_is_not_made(store):
    made = Made(store)
    sft = made.commit("sft", {}, None)
    made.commit("evaluate/sft/generate", {}, sft, GenerationsRef, rows=said("Yes."))
    ppo = made.commit("ppo", {"kl_coef": 0.05}, sft)
    made.commit("evaluate/ppo/generate", {}, ppo, GenerationsRef, rows=said("No."))
    records = {record.label: store.record(record.key) for record in store.records()}
    stages = {label: of_record(record) for label, record in records.items() if record is not None}
    planned = {label: replace(stage, record=None) for label, stage in stages.items() if "ppo" in label}
    whole, half = Side("whole", store, stages), Side("half", store, stages | planned)
    assert different_answers(whole, half, 3) == different_answers(half, whole, 3) == []
    # Two policies, each with its own evaluation, are compared by what each answered last.
    ours, theirs = (of_artifact(ref.digest, store) for ref in (sft, ppo))
    assert different_answers(ours, theirs, 3) == [AnswerPair("Question 0?", "Yes.", "No.")]


def test_profiles_differ_by_their_keys_before_anything_has_run(tmp_path, home):
    profile, store = str(write_mini(tmp_path)), ArtifactStore(home.store)
    ours = side_of(profile, [], store, home, home.mlflow_uri)
    theirs = side_of(profile, ["ppo.kl_coef=0.2", "ppo.steps=3"], store, home, home.mlflow_uri)
    gates = [
        replace(side, config={"gates": f"[{{'name': 'loss', 'value': {value}}}]"})
        for side, value in ((ours, 1), (theirs, 2))
    ]
    assert config_differences(*gates) == [("gates.loss.value", "1", "2")]
    assert config_differences(ours, theirs) == [("ppo.steps", "1", "3"), ("ppo.kl.coef", "0.05", "0.2")]
    found = stage_differences(ours, theirs)
    assert found == [Difference("ppo", ("ppo.steps: 1 -> 3", "ppo.kl.coef: 0.05 -> 0.2"))]
    assert metric_differences(ours, theirs) == different_answers(ours, theirs, 3) == []
    assert set(not_compared(ours, theirs).values()) == {"not made yet"}
    assert list(not_compared(ours, theirs)) == list(ours.stages)


def test_what_is_gone_or_not_made_is_never_called_the_same(store, two, capsys):
    ours = of_artifact(two[0], store)
    sft = ours.stages["sft"].record
    remove_tree(store.folder(sft.handle.uri))
    left = of_artifact(two[0], ArtifactStore(store.root))
    assert left.gone == ("sft",) and list(left.stages) == ["ppo"]
    assert stage_differences(ours, left) == [] and not_compared(ours, left) == {"sft": "the store has no record of it"}
    _print_stages([], ours, left)
    out = capsys.readouterr().out
    assert "stages: 1 of 1 are the same" in out and "not compared, the store has no record of it: sft" in out


def test_labels_that_repeat_are_told_apart(store):
    made = Made(store)
    first = made.commit("ppo", {"kl_coef": 0.05}, None)
    second = made.commit("ppo", {"kl_coef": 0.1}, first)
    assert list(of_artifact(second.digest, store).stages) == [f"ppo {one.digest[:12]}" for one in (first, second)]


def test_two_folders_are_compared_by_their_content(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
        (folder / "weights.txt").write_text("other" if folder.name == "c" else "one")
    for other, said in ((1, "artifacts: the same bytes, "), (2, "artifacts: different, ")):
        assert main(["diff", str(folders[0]), str(folders[other]), "--store", str(store.root)]) == 0
        assert said in capsys.readouterr().out
    assert main(["diff", str(folders[0]), str(folders[1]), "--set", "seed=1"]) == EXIT_REFUSED
    assert "--set = 'seed=1': " in capsys.readouterr().err


def test_a_stage_that_was_made_has_the_code_that_made_it(store):
    made = Made(store)
    made.commit("sft", {}, None)
    (record,) = store.records()
    planned = PlannedStage("sft", toy_spec(label="sft"), Decision("HIT", "", record.key, None))
    assert of_planned(planned, store).code == CODE


def test_the_command_prints_it_all_and_refuses_what_it_does_not_know(store, two, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    assert main(["diff", *two, "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "stages: 0 of 2 are the same; the first that differs by itself: sft" in out
    assert "sft: sft.rate: 0.1 -> 0.2" in out and "B: Never." in out
    assert "ppo: accuracy  0.5 [0.4, 0.6]  0.75 [0.65, 0.85]" in out
    assert main(["diff", *two, "--store", str(store.root), "--samples", "-1"]) == EXIT_REFUSED
    assert "--samples = -1: must be >= 0; use 0 to show none" in capsys.readouterr().err
    assert main(["diff", two[0], "nothing", "--store", str(store.root)]) == EXIT_REFUSED
    assert "'nothing'" in capsys.readouterr().err
