import webbrowser
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import save_file

from pipelines.cli.main import main
from pipelines.services.home import Home
from pipelines.services.run_notes import COMPLETED, new_note
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from tests.support.records import commit, provenance, write_files
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import NoEngines, RecordingTracker, toy_spec

KEY = "5" * 64
TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4\x1b[2J"}]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Return an artifact with a file of each kind, made in a run of this folder and by `toy`."""
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    home = Home.here().make()
    store = ArtifactStore(home.store)
    texts = {"notes/long.md": "\n".join(map(str, range(200))), "report.html": "<p>", "report.json": '{"a":[1,2]}'}
    out = write_files(tmp_path / "out", {**texts, "steps.jsonl": '{"text": "one"}\n{"text": "two"}\n'})
    save_file({"head": torch.zeros(3, 2), "bias": torch.zeros(3).half()}, out / "model.safetensors")
    pq.write_table(pa.Table.from_pylist([{"id": "d1", "turns": TURNS, "ids": [5, 6]}] * 9), out / "train.parquet")
    (out / "state.bin").write_bytes(b"\xff\xfe")
    note = new_note(home, "mini 7", profile="mine.toml", digest="", overrides=["seed=7"], until="", store=home.store)
    note.change()
    metrics = {"loss": 0.5, "accuracy": 0.75, "accuracy_low": 0.5, "accuracy_high": 1.0}
    started = datetime.now(UTC).isoformat()
    ref = commit(store, KEY, out, PolicyRef, children={}, record=provenance(metrics=metrics, started=started))
    note.change(state=COMPLETED)
    return ref


def test_without_a_file_the_files_are_listed_and_the_best_is_shown(made, capsys):
    assert main(["show", made.digest[:8]]) == 0
    first, folder, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"toy: Policy {made.digest[:12]}, ")
    assert first.endswith("made by the run mini 7 of mine.toml --set seed=7")
    assert Path(folder.removeprefix("in: ")).is_dir()
    assert "       11 B  report.json" in lines
    assert "      158 B  model.safetensors: 2 tensors, 9 values, F16 (1), F32 (1)" in lines
    assert "        and  1 more: state.bin" in lines and "          2  metrics" in lines
    assert lines[-1] == f"whole: rlhf show {made.digest[:8]} train.parquet"
    assert "  turns:" in lines and len(lines) < 40
    assert "manifest.json" not in " ".join(lines)


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("report.json", ["{", ' "a": [', "  1,", "  2", " ]", "}"]),
        ("steps.jsonl", ["row 1 of 2", "  text: one", "row 2 of 2", "  text: two"]),
        (
            "train.parquet",
            ["row 1 of 9", "  id: d1", "  turns:", "    user: 2+2?", "    assistant: 4\N{REPLACEMENT CHARACTER}[2J", "  ids (2): 5, 6"],
        ),
        ("model.safetensors", ["2 tensors, 9 values, F16 (1), F32 (1)", "  head  F32 [3, 2]", "  bias  F16 [3]"]),
        ("long.md", [str(number) for number in range(200)]),
        ("metrics", ["accuracy = 0.75 [0.5, 1]", "loss = 0.5"]),
    ],
)  # fmt: skip
def test_a_file_is_printed_readably(made, file, lines, capsys):
    assert main(["show", made.digest, file]) == 0
    assert capsys.readouterr().out.splitlines()[: len(lines)] == lines


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["toi"], "artifact = 'toi': is neither label nor digest of an artifact, nor the path of a folder; did you mean toy?"),
        (["toy", "--profile", "tiny/rlvr"], "artifact = 'toy': no run of the profile tiny-rlvr has made it; `rlhf run tiny/rlvr`"),
        (["{digest}", "reprt.json"], "FILE = 'reprt.json': the artifact has no such file; did you mean report.json?"),
        (["{digest}", "state.bin", "--open"], "--open = 'state.bin': is no page for a browser"),
    ],
)  # fmt: skip
def test_misspelled_names_get_a_suggestion(made, arguments, line, capsys):
    assert main(["show", *(one.format(digest=made.digest) for one in arguments)]) == 2
    assert capsys.readouterr().err.startswith(line)


def test_a_page_opens_in_the_browser_if_there_is_one(made, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: not opened.append(url))
    assert main(["show", made.digest, "--open"]) == 0
    assert opened[0].startswith("file:///") and opened[0].endswith("/report.html")
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["show", made.digest, "report.html", "--open"]) == 0
    assert "this machine has no browser: copy /" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", b"short", "cannot be shown: no header of safetensors"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{x", "cannot be shown: Expecting property name"),
        ("model.safetensors", b"\2\0\0\0\0\0\0\0[]", "cannot be shown: no header of safetensors"),
        ("model.safetensors", b'\x07\0\0\0\0\0\0\0{"a":5}', "cannot be shown: no header of safetensors"),
        ("deep.json", b"[" * 100_000, "cannot be shown: maximum recursion depth"),
        ("rows.jsonl", b'{"a": 1}\n{"a":', "cannot be shown: Expecting value"),
        ("rows.parquet", b"none of it", "cannot be shown: Parquet"),
        ("state.bin", b"\xff\xfe", "(2 B) cannot be shown: 'utf-8' codec"),
    ],
)
def test_a_file_that_cannot_be_read_shows_the_reason(tmp_path, capsys, name, content, said):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_bytes(content)
    assert main(["show", str(tmp_path / "folder"), name, "--store", str(tmp_path / "store")]) == 0
    assert said in capsys.readouterr().out


def test_a_stage_of_a_profile_is_that_of_its_own_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    profile, store = write_mini(tmp_path), ArtifactStore(tmp_path / "home" / "store")
    made = {"runtime": NoEngines(), "tracker": RecordingTracker(), "progress": lambda *_: None}
    ours, _ = execute(store, toy_spec(label="sft", seed=1, pipeline="mini"), **made)
    newest, _ = execute(store, toy_spec(label="sft", seed=2, pipeline="other"), **made)
    for options, ref in (((), newest), (("--profile", str(profile)), ours)):
        assert main(["show", "sft", *options]) == 0
        assert capsys.readouterr().out.startswith(f"sft: Policy {ref.digest[:12]}, ")
