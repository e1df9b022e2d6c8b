"""Union of preference pairs, such as the pairs of all rounds so far."""

from dataclasses import replace

from rlhf_core.data.tables import Preference, read_preferences, write_preferences
from rlhf_core.stage.context import StageContext
from rlhf_core.types import PreferencesRef
from stages.merge_preferences import MergePreferencesConfig

SPLITS = ("train", "eval")


def run(
    config: MergePreferencesConfig, *, preferences: dict[str, PreferencesRef], context: StageContext
) -> PreferencesRef:
    """Merge the pairs of all `preferences`, in the order of their names; the sources name the origin of each pair.

    A duplicate pair is kept once. A prompt that is held out anywhere is held out everywhere, so that no prompt is used
    both for training and for evaluation.
    """
    rows: dict[str, list[Preference]] = {split: [] for split in SPLITS}
    for name, ref in sorted(preferences.items()):
        for split in SPLITS:
            found = read_preferences(context.path(ref) / f"{split}.parquet")
            rows[split] += [replace(row, source=name) for row in found]
    merged, moved = without_overlap(rows)
    for split, kept in merged.items():
        write_preferences(context.out / f"{split}.parquet", kept)
    counts = {split: float(len(kept)) for split, kept in merged.items()}
    total = sum(map(len, rows.values()))
    return context.commit(
        PreferencesRef, metrics=counts | {"moved": float(moved), "duplicates": total - sum(counts.values())}
    )


def without_overlap(rows: dict[str, list[Preference]]) -> tuple[dict[str, list[Preference]], int]:
    """Train and eval without repeated pairs and without common prompts, and the number of pairs moved to eval."""
    held = {row.prompt for row in rows["eval"]}
    seen: set[tuple[object, ...]] = set()
    merged: dict[str, list[Preference]] = {split: [] for split in SPLITS}
    moved = 0
    for split in ("eval", "train"):
        for row in rows[split]:
            pair = (row.prompt, row.chosen, row.rejected)
            if pair in seen:
                continue
            seen.add(pair)
            moves = split == "train" and row.prompt in held
            moved += moves
            merged["eval" if moves else split].append(row)
    return merged, moved
