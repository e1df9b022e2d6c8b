"""Tell the file type of a data source. Planning asks this, so no library that reads files is imported."""

from __future__ import annotations

import re
from pathlib import Path

from rlhf_core.config.data import Source
from rlhf_core.errors import ConfigError, explain

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


def is_hub(source: Source) -> bool:
    """Return whether `source` names a dataset of the Hugging Face Hub instead of a local file."""
    return file_type(source) == "hub"


def file_type(source: Source) -> str:
    """Return the file type of the source; `auto` recognizes folders, then file suffixes, then Hub names.

    Raises ConfigError for a name of unknown type, and for a Hub name without the commit that pins it.
    """
    kind: str = source.file_type
    if kind == "auto":
        suffixes = [suffix.lower() for suffix in Path(source.path).suffixes if suffix.lower() != ".gz"]
        path = Path(source.path).expanduser()
        if path.is_dir():
            kind = "saved_dataset"
        elif suffixes and suffixes[-1] in _SUFFIXES:
            kind = _SUFFIXES[suffixes[-1]]
        elif source.path.count("/") == 1 and not source.path.startswith((".", "/", "~")):
            kind = "hub"
        else:
            raise ConfigError(
                explain(
                    f"data.sources[{source.name}].path",
                    source.path,
                    f"neither a folder, a Hub name, nor a file ending in {sorted(_SUFFIXES)}",
                    "check the path, or set `file_type`",
                )
            )
    if kind == "hub" and not re.fullmatch(r"[0-9a-f]{40}", source.revision):
        raise ConfigError(
            explain(
                f"data.sources[{source.name}].revision",
                source.revision,
                f"must be the full commit of the Hub data set {source.path!r}, since branches and tags move",
                "copy the 40-digit hash from the page of the data set",
            )
        )
    return kind
