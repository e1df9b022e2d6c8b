"""Compare the packages, tokenizers and chat templates of a stage's result with the current ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlhf_core.stage.key import StageSpec
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import hash_file, sha256_text
from rlhf_core.store.records import KeyRecord, other_versions

TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
CHAT_TEMPLATE = "chat_template.jinja"


def version_lines(store: ArtifactStore, spec: StageSpec, record: KeyRecord | None) -> Iterator[str]:
    """Yield the differences to the versions that made the stage, from `record` or the last result with its label.

    Packages count only with `--strict-env`; tokenizers and chat templates are files of the inputs and always count.
    """
    made = record or store.latest(spec.label)
    now = input_versions(store, (ref.uri for ref in spec.refs()))
    if made is None:
        yield from (f"{name}: {digest[:12]}" for name, digest in now.items())
        return
    others = other_versions(made.environment)
    yield from others or ["packages: the same versions as when it was made"]
    then = input_versions(store, made.inputs)
    for name in sorted(then.keys() | now.keys()):
        before, after = (table[name][:12] if name in table else "none" for table in (then, now))
        yield f"{name}: {after}, the same as when it was made" if before == after else f"{name}: {before} -> {after}"


def input_versions(store: ArtifactStore, uris: Iterable[str]) -> dict[str, str]:
    """Return one digest of all tokenizers and one of all chat templates among the inputs that still exist."""
    tokenizers, templates = [], []
    for uri in uris:
        folder = store.folder(uri)
        tokenizers += [f"{name} {hash_file(folder / name)}" for name in TOKENIZER if (folder / name).is_file()]
        templates += [sha256_text(text) for text in [_chat_template(folder)] if text]
    found = {"tokenizer": tokenizers, "chat template": templates}
    return {name: sha256_text("\n".join(parts)) for name, parts in found.items() if parts}


def _chat_template(folder: Path) -> str:
    if (folder / CHAT_TEMPLATE).is_file():
        return (folder / CHAT_TEMPLATE).read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    table = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return json.dumps(table["chat_template"]) if "chat_template" in table else ""
