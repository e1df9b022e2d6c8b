"""Paths of a profile, as they are read from another folder."""

from pipelines.flows.profile_paths import as_read_from
from rlhf_core.schema.base import as_written

ROW = '{"prompt": "one", "answer": "1"}\n'


def test_a_profile_of_a_subfolder_is_read_from_the_folder_of_the_services(tmp_path, monkeypatch):
    """`rlhf deploy` in a subfolder: the runs of the deployment begin in the folder in which `rlhf up` was started."""
    sub, beside = tmp_path / "team" / "desk", tmp_path / "other"
    for folder in (sub, beside):
        folder.mkdir(parents=True)
    (sub / "rows.jsonl").write_text(ROW)
    (sub / "reward.py").write_text("def brief(rows):\n    return [1.0 for _ in rows]\n")
    monkeypatch.chdir(sub)
    table = {"path": "././rows.jsonl", "rubric_file": "rows.jsonl", "model": {"path": "org/model"}, "store": "kept"}
    table |= {
        "function": "reward.py:brief",
        "terms": {"a": {"file": "/abs.jsonl"}},
        "arguments": {"path": "rows.jsonl"},
    }
    moved = as_read_from(tmp_path, table)
    assert moved == table | {
        "path": "team/desk/./rows.jsonl",
        "rubric_file": "team/desk/./rows.jsonl",
        "function": "team/desk/./reward.py:brief",
        "store": "team/desk/kept",
    }
    assert as_read_from(sub, table) == table
    assert as_read_from(beside, table)["path"] == f"{sub}/./rows.jsonl"
    assert as_read_from(tmp_path, {"store": "s3://bucket/kept"}) == {"store": "s3://bucket/kept"}
    for name in ("path", "function"):
        assert as_written(moved[name]) == as_written(table[name]).removeprefix("./"), "the part that a key has"
    assert (tmp_path / moved["path"]).read_text() == ROW
