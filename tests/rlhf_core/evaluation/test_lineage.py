"""The way back from an artifact to the data."""

from rlhf_core.evaluation.lineage import lineage
from rlhf_core.store.records import KeyRecord
from rlhf_core.types import ArtifactRef, DemonstrationsRef, PolicyRef, PreparedDataRef


def record(label: str, handle: ArtifactRef) -> KeyRecord:
    return KeyRecord(
        label=label, stage=label, payload={"config": {"of": label}}, inputs=(), code={}, metrics={}, engines={},
        environment={}, started="2026-01-01T00:00:00Z", seconds=1.0, tracking={}, attempts=1, resumed_from=None,
        key=f"key-{label}", handle=handle,
    )  # fmt: skip


DATA = PreparedDataRef(
    uri="store://d0", digest="d0", demonstrations=DemonstrationsRef(uri="store://d0/demonstrations", digest="d1")
)
RECORDS = [
    record("prepare_data", DATA),
    record("sft", PolicyRef(uri="store://p1", digest="p1", parents=("d1", "base-model-on-a-disk"))),
    record("dpo", PolicyRef(uri="store://p2", digest="p2", parents=("p1", "d1"))),
    record("unrelated", PolicyRef(uri="store://p9", digest="p9")),
]


def test_ancestors_stand_before_what_was_made_from_them_and_once():
    nodes = lineage(RECORDS, ["p2", "p1"])
    assert [node.label for node in nodes] == ["prepare_data", "sft", "dpo"]
    assert [node.parents for node in nodes] == [(), ("prepare_data", "base-model-o"), ("sft", "prepare_data")]
    assert nodes[1].config == {"of": "sft"}


def test_what_no_stage_made_has_no_lineage():
    assert lineage(RECORDS, ["somebody's"]) == []


def test_a_stage_that_returned_its_own_input_does_not_loop():
    assert [
        node.label for node in lineage([record("loop", PolicyRef(uri="u", digest="x", parents=("x",)))], ["x"])
    ] == ["loop"]


def test_a_secret_that_an_earlier_version_kept_does_not_get_into_reports():
    old = record("score", PolicyRef(uri="store://p1", digest="p1"))
    old.payload["config"]["terms"] = {"mine": {"arguments": {"api_key": "hunter2", "n": 3, "other_key": "env:KEY"}}}
    (node,) = lineage([old], ["p1"])
    assert node.config == {
        "of": "score",
        "terms": {"mine": {"arguments": {"api_key": "***", "n": 3, "other_key": "env:KEY"}}},
    }
