"""Find the folder of a store, and open the store that lies there or in the bucket that the folder caches."""

import json
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from rlhf_core.errors import ConfigError
from rlhf_core.store.addresses import SCHEMES, check_address
from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.earlier import EarlierBucketStore, EarlierDiskStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import MARKER, SCHEMA, cache_folder, read_json, write_text
from rlhf_core.store.object_server import repeat

PROBE_PATIENCE_S = 3.0
"""How long the first requests to a bucket are repeated if a response breaks; the client tries a silent address for longer."""


def store_root(place: str) -> Path:
    """The folder of a store: the folder that `place` names, or this node's cache of the bucket `s3://...`.

    Raises ConfigError for an invalid address, and for a bucket that cannot be reached or whose server has no conditional
    puts.
    """
    if not place:
        raise ConfigError("store", place, "is empty", "name a folder, or a bucket such as s3://BUCKET/FOLDER")
    if "://" not in place and place.partition(":/")[0].lower() not in SCHEMES:
        return _folder(place)
    check_address(place)
    uri = place.rstrip("/")
    root = cache_folder() / f"{uri.rpartition('/')[2]}-{sha256_text(uri)[:8]}"
    known = read_json(root / MARKER)
    if known is None or known["schema"] < SCHEMA:
        from rlhf_core.store.bucket_server import probe  # obstore, which stores on disks do not need

        repeat(lambda: probe(uri), PROBE_PATIENCE_S)
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)  # models and data of a bucket that others on this machine may not be allowed to read
        write_text(root / MARKER, json.dumps({"mirrors": uri, "schema": SCHEMA}, indent=1), durable=True)
    return root


def open_store(root: Path) -> DiskStore | BucketStore:
    """The store in a folder, or in the bucket that the folder caches."""
    root = Path(root).absolute()
    uri = bucket_of(root)
    return EarlierDiskStore(root) if uri is None else _open_bucket_store(root, uri)


def bucket_of(root: Path) -> str | None:
    """The address of the bucket that a folder caches; None for a store on a disk."""
    known = read_json(root / MARKER) if (root / MARKER).is_file() else None
    return None if known is None or "mirrors" not in known else str(known["mirrors"])


def place_of(root: Path) -> str:
    """The name of the store in a folder on any node: the address of its bucket, or its path."""
    return bucket_of(root) or str(root)


@cache
def _open_bucket_store(root: Path, uri: str) -> BucketStore:
    """Open one client per process: its listings are shared by all users of the store."""
    from rlhf_core.store.bucket_server import ObstoreServer

    return EarlierBucketStore(ObstoreServer(uri), root, uri, ObstoreServer(uri, prefix=""))


def check_writable(root: Path) -> None:
    """Raise ConfigError if this user can neither write to the folder of a store nor make it."""
    found = _nearest(root)
    if not os.access(found, os.W_OK | os.X_OK):
        remedy = (
            "name a folder of your own; for a store that you only read, use `--store` of the commands that show results"
        )
        raise ConfigError("store", str(root), f"this user cannot write to {found}", remedy)


def _folder(place: str) -> Path:
    """The folder of a store on a disk. Raises ConfigError for a text that cannot be a path, or is no folder."""
    try:
        found = Path(place).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            found.stat()  # UnicodeEncodeError and ValueError for characters that no path has
        nearest = _nearest(found)
        said = "" if nearest.is_dir() else f"{nearest} is {'no folder' if nearest.exists() else 'a link to nothing'}"
    except (RuntimeError, ValueError, OSError) as error:  # an unknown user; a name that is too long
        said = str(getattr(error, "strerror", "") or error)
    if said:
        raise ConfigError(
            "store", place, f"cannot be a folder ({said})", "name a folder, or s3://BUCKET/FOLDER"
        ) from None
    return found


def _nearest(path: Path) -> Path:
    """The path itself or, if nothing is there, the nearest folder above it that exists."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if os.path.lexists(one))
