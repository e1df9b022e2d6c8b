"""The union of pairs: their sources, repeated pairs, and prompts that are held out anywhere."""

from pathlib import Path

from rlhf_core.data.tables import Preference, read_preferences, write_preferences
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import Message, PreferencesRef
from stages.merge_preferences import MergePreferencesConfig
from tests.support.workshop import Workshop


def pair(prompt: str, chosen: str = "good", rejected: str = "bad") -> Preference:
    turn = (Message("assistant", chosen),), (Message("assistant", rejected),)
    return Preference(f"{prompt}-{chosen}", (Message("user", prompt),), *turn, 0.0, "world")


def collected(
    store: ArtifactStore, folder: Path, train: list[Preference], held_out: list[Preference]
) -> PreferencesRef:
    write_preferences(folder / "train.parquet", train)
    write_preferences(folder / "eval.parquet", held_out)
    return store.external(PreferencesRef, folder)


def test_no_prompt_that_is_measured_on_is_trained_on_and_no_pair_counts_twice(tmp_path, store):
    inputs = {
        "preferences": {
            "round_2": collected(store, tmp_path / "2", [pair("p1"), pair("p3", "other")], [pair("p5")]),
            "round_1": collected(store, tmp_path / "1", [pair("p1"), pair("p2"), pair("p5", "new")], [pair("p3")]),
        }
    }
    shop = Workshop(store)
    ref, decision = shop.run("merge_preferences", MergePreferencesConfig(), inputs)
    rows = {split: read_preferences(store.path(ref) / f"{split}.parquet") for split in ("train", "eval")}
    assert [(row.id, row.source) for row in rows["train"]] == [("p1-good", "round_1"), ("p2-good", "round_1")]
    assert sorted((row.id, row.source) for row in rows["eval"]) == [
        ("p3-good", "round_1"),
        ("p3-other", "round_2"),
        ("p5-good", "round_2"),
        ("p5-new", "round_1"),
    ]
    metrics = shop.metrics(decision)
    assert (metrics["train"], metrics["eval"], metrics["moved"], metrics["duplicates"]) == (2, 4, 2, 1)
