"""Odd addresses of stores and of servers: each works or is one error, and no client fails on it later."""

import random
from collections.abc import Iterator

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.schema.base import HttpAddress
from rlhf_core.store.places import mirror
from rlhf_core.store.places.buckets import open_bucket
from rlhf_core.store.places.mirror import store_root

COUNT = 1000
BEGINNINGS = ("s3://", "gs://", "az://", "S3://", "s3:/", "http://", "file://", "", "~", "~/", "~nosuchuser", "/", "\\")
PARTS = (
    *(
        "bucket",
        "my-bucket",
        "[x",
        "[::1]",
        "a@b",
        "k:s@b",
        "%41",
        "a b",
        "",
        "..",
        ".",
        "\u00e9",
        "\0",
        "\n",
        "x" * 300,
    ),
    *("b:80", "b:99999", "_", "A", "b?c=1", "b#f", "*", "\u202e", "\ud800", "acct.blob.core.windows.net", "\U0001f4a5"),
)
SCHEMES = ("http://", "https://", "HTTP://", "ftp://", "", "http:/", "//")
HOSTS = (
    *(
        "host",
        "127.0.0.1",
        "[::1]",
        "[::1",
        "::1",
        "h:80",
        "h:0",
        "h:65536",
        "h:-1",
        "h:x",
        "u:p@h",
        "h%20",
        "h_",
        "-h",
    ),
    *(
        "h..x",
        ".",
        "\u00e9",
        "xn--",
        "xn--a",
        "\0",
        "\n",
        "a b",
        "h?x",
        "h#y",
        "h\\x",
        "*",
        "]",
        "{}",
        "\u202e",
        "x" * 300,
    ),
)
ENDS = ("", "/", "/v1", "/a b", "?x=1", "#f", "/%zz", "/\u00e9", " ", "\n")


@pytest.fixture(autouse=True)
def no_provider(monkeypatch, tmp_path):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "probe", lambda bucket: None)  # asks the bucket's server


def stores() -> Iterator[str]:
    chance = random.Random(7)
    for _ in range(COUNT):
        parts = "/".join(chance.choice(PARTS) for _ in range(chance.randint(1, 4)))
        yield chance.choice(BEGINNINGS) + parts + chance.choice(["", "/", "//", " "])


def servers() -> Iterator[str]:
    chance = random.Random(8)
    for _ in range(COUNT):
        yield chance.choice(SCHEMES) + chance.choice(HOSTS) + chance.choice(ENDS)


def test_an_odd_store_is_a_folder_a_bucket_or_one_error():
    for address in stores():
        try:
            store_root(address)
        except RlhfError as error:
            assert "\n" not in str(error) and str(error).isprintable(), repr(address)


def test_an_odd_endpoint_of_a_bucket_is_used_or_one_error(monkeypatch):
    for address in servers():
        if "\0" in address:
            continue  # no variable can have it
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        try:
            open_bucket("s3://bucket/folder")
        except RlhfError as error:
            assert "\n" not in str(error) and str(error).isprintable(), repr(address)


def test_a_server_that_a_profile_may_name_can_be_asked():
    accepts = TypeAdapter(HttpAddress)
    for address in servers():
        try:
            accepts.validate_python(address)
        except ValidationError:
            continue
        assert httpx.Request("POST", f"{address.rstrip('/')}/chat").url.host, repr(address)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "az://bucket/x",
            r"store = 'az://bucket/x': cannot be opened \(.*Account must be specified\); .*AZURE_STORAGE_",
        ),
        ("s3://[x", r"store = 's3://\[x': has a bucket that is no name of one"),
        ("~nosuchuser", r"store = '~nosuchuser': cannot be a folder \(Could not determine home directory"),
    ],
)
def test_a_store_that_cannot_be_is_named_with_a_remedy(address, said):
    with pytest.raises(ConfigError, match=said):
        store_root(address)
