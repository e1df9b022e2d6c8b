"""Detect the file type of a data source, its files, and files of another type.

Planning uses it, so it imports no library that reads them.
"""

import glob
import os
import re
from pathlib import Path

from rlhf_core.config.data import Source
from rlhf_core.errors import ConfigError, DataError, explain

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
PACKED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""Suffix of packed files of text -> the bytes that they begin with."""

_SAVED_DATASET = ("state.json", "dataset_dict.json", "dataset_info.json")
_SPLITS = re.compile(r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?![a-z])")
_OTHERS = (
    (b"version https://git-lfs", "a pointer of Git LFS instead of the file", "fetch the file with `git lfs pull`"),
    (b"\xff\xfe", "UTF-16", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16", "save it as UTF-8"),
    (PACKED[".gz"], "packed with gzip", "let its name end in .gz"),
    (PACKED[".zst"], "packed with Zstandard", "let its name end in .zst"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it"),
    (b"PAR1", "Parquet", "set file_type = 'parquet'"),
    (b"ARROW1", "Arrow", "set file_type = 'arrow'"),
    (b"<!doctype", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
)
"""First bytes of a file, in lower case -> its type, and the remedy if another type was expected."""
_JSON = re.compile(rb'\[?\s*\{(\s*"|\s*$)')
_OWN = {"parquet": "Parquet", "arrow": "Arrow"}


def is_hub(source: Source) -> bool:
    """Whether `source` names a dataset of the Hugging Face Hub instead of local files."""
    return file_type(source) == "hub"


def source_files(path: str) -> list[Path]:
    """List the file at `path`, the files in a folder whose types can be read, or the files that match a pattern.

    The files are sorted by name. A folder that `Dataset.save_to_disk` wrote counts as one file.
    """
    found = Path(path).expanduser()
    if found.is_dir() and not any((found / name).exists() for name in _SAVED_DATASET):
        return sorted(one for one in found.rglob("*") if one.is_file() and _suffix(one) and not _hidden(one, found))
    if found.exists() or not glob.has_magic(path):
        return [found]
    return sorted(one for one in map(Path, glob.glob(str(found), recursive=True)) if one.is_file())  # noqa: PTH207


def file_type(source: Source) -> str:
    """Detect the file type of the source; `auto` recognizes folders, then file suffixes, then Hub names.

    Raises ConfigError for pipes and devices, for a name of unknown type, for a Hub name without the commit that pins
    it, and for a folder or a pattern without files, with several types or with several splits.
    """
    kind: str = source.file_type
    path = Path(source.path).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):
        rule = "a pipe, a device or a socket, which is read for ever"
        raise ConfigError(at_path(source, rule, "name a file or a folder of files"))
    if kind == "auto":
        if path.is_dir() or (glob.has_magic(source.path) and not path.exists()):
            kind = _type_of_files(source)
        elif suffix := _suffix(path):
            kind = _SUFFIXES[suffix]
        elif source.path.count("/") == 1 and not source.path.startswith((".", "/", "~")):
            kind = "hub"
        else:
            rule = f"neither a folder, a Hub name, nor a file ending in {', '.join(sorted(_SUFFIXES))}"
            raise ConfigError(at_path(source, rule, "check the path, or set `file_type`"))
    if kind == "hub" and not re.fullmatch(r"[0-9a-f]{40}", source.revision):
        rule = f"must be the full commit of the Hub data set {source.path!r}, since branches and tags move"
        remedy = "copy the 40-digit hash from the page of the data set"
        raise ConfigError(f"data.sources[{source.name}].revision", source.revision, rule, remedy)
    return kind


def refuse_other_type(begin: bytes, kind: str, source: Source, *, path: Path) -> None:
    """Raise DataError, with the remedy, if a file that begins with the bytes `begin` is not of the type `kind`."""
    text = begin.removeprefix(b"\xef\xbb\xbf").lstrip()
    header = text.partition(b"\n")[0]
    begins = begin.lower(), text.lower()
    found = next(
        ((rule, remedy) for magic, rule, remedy in _OTHERS if any(one.startswith(magic.lower()) for one in begins)),
        ("", ""),
    )
    if found[0] == _OWN.get(kind):
        return
    if not found[0] and kind not in _OWN:
        if b"\0" in begin:
            found = "UTF-16, or no text", "save it as UTF-8"
        elif kind == "jsonl" and (text[:1] == b"[" or header.strip() == b"{"):
            found = "one value of JSON, not an object a line", "set file_type = 'json', or write one row a line"
        elif kind in ("csv", "tsv") and _JSON.match(header):
            found = "JSON", "set file_type = 'json', or 'jsonl' for one row a line"
        elif kind == "csv" and b"," not in header and b"\t" in header:
            found = "separated by tabs", "set file_type = 'tsv'"
        elif kind == "tsv" and b"\t" not in header and b"," in header:
            found = "separated by commas", "set file_type = 'csv'"
        elif kind in ("csv", "tsv") and not {b",", b"\t"} & {bytes([one]) for one in header} and b";" in header:
            found = "separated by semicolons", "write it with commas"
    if found[0]:
        raise DataError(f"data.sources[{source.name}].path", str(path), f"is {found[0]}", found[1])


def at_path(source: Source, rule: str, remedy: str) -> str:
    """Format the message of an error about the path of `source`."""
    return explain(f"data.sources[{source.name}].path", source.path, rule, remedy)


def _suffix(path: Path) -> str:
    """The suffix of a known file type, without the suffix of compression, or the empty text."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in PACKED]
    return suffixes[-1] if suffixes and suffixes[-1] in _SUFFIXES else ""


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)


def _type_of_files(source: Source) -> str:
    files = source_files(source.path)
    if files == [Path(source.path).expanduser()]:
        return "saved_dataset"
    kinds = sorted({_SUFFIXES[suffix] if (suffix := _suffix(one)) else "other" for one in files})
    if not files:
        raise ConfigError(at_path(source, f"no file there ends in {', '.join(sorted(_SUFFIXES))}", "check the path"))
    if len(kinds) > 1:
        remedy = "name those of one with a pattern, such as '*.jsonl'"
        raise ConfigError(at_path(source, f"has files of several types, {kinds}", remedy))
    folder = os.path.commonpath([one.parent for one in files])
    splits = sorted({_split(one.relative_to(folder)) for one in files})
    if len(splits) > 1 and splits != ["", "train"]:
        shown = [split or "none in the name" for split in splits]
        remedy = "name those of one with a pattern, 'train-*'"
        raise ConfigError(at_path(source, f"has files of several splits, {shown}", remedy))
    return kinds[0]


def _split(path: Path) -> str:
    """Read the split from the name of a file, or else of a folder around it; empty if no name has one."""
    found = (_SPLITS.search(part.lower()) for part in reversed(path.parts))
    return next((match[1] for match in found if match), "")
