"""Records and objects in a bucket: S3 and what speaks its language, Google Cloud Storage, Azure, through `obstore`.

Credentials, region and endpoint come from the environment or the machine's role, under the names of the providers' own tools:
`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`.

A put is conditional (`If-None-Match`, `If-Match`, a generation). Each record has a random member, so that no two contents
have one ETag, and a put whose answer was lost is known to be ours. A removal cannot be conditional: a record is dropped by
an empty one in its place.
"""

import hashlib
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rlhf_core.errors import ConfigError, explain
from rlhf_core.processes.identity import is_loopback
from rlhf_core.schema.hosts import is_host
from rlhf_core.secrets.redaction import shown
from rlhf_core.store.places import Conflict, Unreachable, Versioned

SCHEMES = ("s3", "gs", "az")
_MARK, _DROPPED = "_put", "_dropped"
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
_NOT_IN_ADDRESSES = "?#%:\\"
_LONGEST_FOLDER = 200  # bytes: the folder that mirrors it has this name and a digest
_LARGE = 16 << 20  # bytes from which a file is sent in parts
_PART = 5 << 20  # the least that S3 takes; four are in memory at once, and an object has at most 10,000
_ONE_LARGE = threading.Lock()
"""Held while a large file is sent, whose parts are sent at once: each is in memory."""
_TRIES = 5
"""Puts of one record, where the server says 409: another put of it is under way."""


@dataclass(frozen=True)
class Bucket:
    """The client of a bucket, or of a folder in one; `uri` is what a profile names as its store."""

    uri: str
    client: Any

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Turn errors of the client into Unreachable, but for those that a caller expects."""
        from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError

        try:
            yield
        except (AlreadyExistsError, NotModifiedError, PreconditionError):
            raise
        except BaseError as error:
            said = " ".join(str(error).split())[:300]
            rule, remedy = f"does not do what it was asked for ({said})", "check address, credentials and network"
            raise Unreachable(explain("store", shown(self.uri), rule, remedy)) from error


def check_address(uri: str) -> None:
    """Raise ConfigError for an address that is not `s3://bucket/folder`, `gs://` or `az://`, or that has two spellings."""
    bucket, *folders = uri.rstrip("/").partition("://")[2].split("/")
    if uri.partition("://")[0] not in SCHEMES or not bucket:
        rule = f"is no bucket; known are {', '.join(f'{scheme}://' for scheme in SCHEMES)}"
        raise ConfigError("store", uri, rule, "write s3://BUCKET/FOLDER")
    if not re.fullmatch(r"[\x21-\x7e]+", bucket) or "[" in bucket or len(bucket) > _LONGEST_FOLDER:
        rule = "has a bucket that is no name of one: letters, digits, '.', '-' and '_'"
        raise ConfigError("store", uri, rule, "write s3://BUCKET/FOLDER")
    if "@" in bucket:
        rule = "has credentials, which belong into the environment"
        raise ConfigError("store", f"...@{uri.rpartition('@')[2]}", rule, "write s3://BUCKET/FOLDER")
    if not uri.isprintable():
        raise ConfigError("store", uri, "has signs that do not print", "write s3://BUCKET/FOLDER")
    if found := next((sign for sign in _NOT_IN_ADDRESSES if sign in uri.partition("://")[2]), ""):
        rule = f"has {found!r}, so it may mean another bucket or folder than it names"
        raise ConfigError("store", uri, rule, "write s3://BUCKET/FOLDER")
    if bad := [one for one in folders if one in ("", ".", "..") or len(one.encode()) > _LONGEST_FOLDER]:
        rule = f"has a folder {bad[0]!r}; one must have 1 to {_LONGEST_FOLDER} bytes, and be neither . nor .."
        raise ConfigError("store", uri, rule, "write s3://BUCKET/FOLDER")


def open_bucket(uri: str) -> Bucket:
    """Return the client of the bucket that `s3://bucket/folder`, `gs://` or `az://` names. Raises ConfigError without obstore."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError:
        remedy = "pip install 'rlhf-lifecycle[s3]'"
        raise ConfigError("store", uri, "needs the package obstore, which is not installed", remedy) from None
    check_address(uri)
    for name in [name for name, value in os.environ.items() if name.startswith(_VARIABLES) and not value.strip()]:
        del os.environ[name]  # as the providers' own tools read it; an empty key would take the place of a role
    host = _endpoint_host()
    local = bool(host) and is_loopback(host)
    asked = "AWS_ALLOW_HTTP" in os.environ and os.environ["AWS_ALLOW_HTTP"].lower() in ("1", "true")
    options: Any = {"allow_http": True} if local or asked else {}
    try:
        return Bucket(uri, from_url(uri, client_options=options))
    except (BaseError, ValueError) as error:  # variables that are missing, or a name that no bucket can have
        rule = f"cannot be opened ({str(error).splitlines()[0]})"
        remedy = "correct it, or set the variables of its provider, for az:// AZURE_STORAGE_ACCOUNT_NAME"
        raise ConfigError("store", uri, rule, remedy) from None


def _endpoint_host() -> str:
    """Return the host of an S3 that is not Amazon's, or "". Raises ConfigError for what is no address: the client would panic."""
    name = next((name for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT") if name in os.environ), "")
    if not name:
        return ""
    endpoint = os.environ[name]
    try:
        parts = urlsplit(endpoint)
        may_be = parts.port != 0 and is_host(parts.hostname or "")
    except ValueError:  # as of http://[::1 or a port that is no number
        may_be = False
    if not may_be or not re.fullmatch(r"https?://[^\s/@?#]+(/[\x21-\x7e]*)?", endpoint):
        raise ConfigError(name, shown(endpoint), "is no address of a server", "write http://HOST:PORT or https://HOST")
    return parts.hostname or ""


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class BucketRecords:
    """The records of a bucket whose names begin with `prefix`."""

    has_clock: ClassVar[bool] = False  # a bucket's clock is not asked: whoever wants a lease watches it
    bucket: Bucket
    prefix: str

    def get(self, name: str) -> Versioned | None:
        found = self.found(name)
        return None if found is None or found.dropped else found

    def put(self, name: str, value: Mapping[str, Any], expected: str | None) -> str:
        return self._put(name, dict(value), expected)

    def drop(self, name: str, expected: str) -> None:
        self._put(name, {_DROPPED: True}, expected)

    def names(self) -> Iterator[str]:
        yield from (name for name, _, _ in self.versions())

    def age(self, name: str) -> float:
        return math.inf

    def versions(self, under: str = "") -> Iterator[tuple[str, str, float]]:
        """Yield name, version and time of writing (seconds since 1970) of each record; dropped ones are among them."""
        with self.bucket.answering():
            for some in self.bucket.client.list(self.prefix + under, chunk_size=1000):
                for item in some:
                    yield item["path"].removeprefix(self.prefix), _version(item), item["last_modified"].timestamp()

    def found(self, name: str) -> Versioned | None:
        """Return a record, also a dropped one."""
        stored = self._stored(name)
        if stored is None:
            return None
        value, version = stored
        mine = {key: one for key, one in value.items() if key not in (_MARK, _DROPPED)}
        return Versioned(mine, version, dropped=_DROPPED in value)

    def _stored(self, name: str) -> tuple[dict[str, Any], str] | None:
        with self.bucket.answering():
            try:
                got = self.bucket.client.get(self.prefix + name)
                return json.loads(bytes(got.bytes())), _version(got.meta)
            except FileNotFoundError:
                return None

    def _put(self, name: str, value: dict[str, Any], expected: str | None) -> str:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mark = secrets.token_hex(8)
        raw = json.dumps({**value, _MARK: mark}).encode()
        for attempt in range(_TRIES):
            try:
                with self.bucket.answering():
                    done = self.bucket.client.put(self.prefix + name, raw, mode=_mode(expected), use_multipart=False)
                    return _version(done)
            except (AlreadyExistsError, PreconditionError):
                is_sure = True
            except FileNotFoundError:  # of a record to be changed that is not there; a new one needs its bucket alone
                if expected is None:
                    rule, remedy = "there is no such bucket", "create it, or name another one"
                    raise Unreachable(explain("store", shown(self.bucket.uri), rule, remedy)) from None
                is_sure = True
            except Unreachable as error:
                if "409" not in str(error):
                    raise
                is_sure = False
            there, version = self._stored(name) or ({}, None)
            if version is not None and there.get(_MARK) == mark:
                return version  # the first try was done, and its answer lost
            if expected is None and version is not None and _DROPPED in there:
                expected = version
            elif is_sure or not is_same(version, expected):
                raise Conflict(name)
            time.sleep(0.05 * 2**attempt)
        raise Conflict(name)


def _version(meta: Mapping[str, Any]) -> str:
    return json.dumps([meta["e_tag"], meta.get("version")])


def is_same(one: str | None, other: str | None) -> bool:
    """Return whether two versions are of one content: by its ETag, because lists do not name the version of a versioned bucket."""
    return one == other or (one is not None and other is not None and json.loads(one)[0] == json.loads(other)[0])


def _mode(expected: str | None) -> Any:
    if expected is None:
        return "create"
    try:
        tag, version = json.loads(expected)
    except ValueError:
        raise Conflict("no version of a bucket") from None
    return {"e_tag": tag} | ({} if version is None else {"version": version})


# ---------------------------------------------------------------- objects


@dataclass(frozen=True)
class BucketObjects:
    """The files of a bucket."""

    bucket: Bucket

    def put_file(self, name: str, path: Path) -> None:
        size = path.stat().st_size
        large = size > _LARGE
        with _ONE_LARGE if large else nullcontext(), self.bucket.answering():
            part = max(_PART, size // 9_000)
            self.bucket.client.put(name, path, use_multipart=large, chunk_size=part, max_concurrency=4)
        if (self.found(name) or (-1, 0.0))[0] != size:
            raise Unreachable(explain("store", name, f"has not {size} bytes after its upload", "run again"))

    def get_file(self, name: str, path: Path) -> None:
        with path.open("wb") as out, self.bucket.answering():
            for chunk in self.bucket.client.get(name).stream(min_chunk_size=8 << 20):
                out.write(chunk)

    def found(self, name: str) -> tuple[int, float] | None:
        with self.bucket.answering():
            try:
                meta = self.bucket.client.head(name)
            except FileNotFoundError:
                return None
        return int(meta["size"]), meta["last_modified"].timestamp()

    def listed(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        with self.bucket.answering():
            for some in self.bucket.client.list(prefix, chunk_size=1000):
                for item in some:
                    yield item["path"], int(item["size"]), item["last_modified"].timestamp()

    def delete(self, name: str) -> None:
        with self.bucket.answering():
            try:
                self.bucket.client.delete(name)
            except FileNotFoundError:
                return


# ---------------------------------------------------------------- does the server keep its conditions?

PROBES = (
    "a record that exists can be made again (If-None-Match is ignored)",
    "a record can be changed from a version that it no longer has (If-Match is ignored)",
    "a record cannot be changed from its version",
    "a record does not hold what was written last",
)


_PASSED = "probes/passed"


def probe(bucket: Bucket) -> None:
    """Try the conditional puts that a store rests on, once per bucket. Raises ConfigError for a server that does not keep one."""
    if BucketObjects(bucket).found(_PASSED) is not None:
        return
    records = BucketRecords(bucket, f"probes/{hashlib.sha256(os.urandom(8)).hexdigest()[:16]}/")
    failed = _failed_probe(records)
    for name in list(records.names()):
        BucketObjects(bucket).delete(records.prefix + name)
    if failed:
        rule = f"on this server {failed}, so two runs could compute the same key, or lose a result"
        remedy = (
            "use a server with conditional puts (Amazon S3, Google Cloud Storage, Azure, MinIO, SeaweedFS), or a folder"
        )
        raise ConfigError("store", bucket.uri, rule, remedy)
    with bucket.answering():
        bucket.client.put(_PASSED, b"")


def _failed_probe(records: BucketRecords) -> str:
    first = records.put("probe", {"n": 1}, None)
    if _is_done(records, 2, None):
        return PROBES[0]
    if not _is_done(records, 3, first):
        return PROBES[2]
    if _is_done(records, 4, first):
        return PROBES[1]
    found = records.get("probe")
    return "" if found is not None and found.value["n"] == 3 else PROBES[3]


def _is_done(records: BucketRecords, number: int, expected: str | None) -> bool:
    try:
        records.put("probe", {"n": number}, expected)
    except Conflict:
        return False
    return True
