"""Odd addresses of stores and of servers: each works or is one error, and no client fails on it later."""

import os
import random
import stat
from collections.abc import Iterator

import httpx
import pytest
from pydantic import TypeAdapter, ValidationError

from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.schema.base import HttpAddress
from rlhf_core.store import bucket_server
from rlhf_core.store.addresses import open_bucket
from rlhf_core.store.opening import open_store, place_of, store_root

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
    monkeypatch.setattr(bucket_server, "probe", open_bucket)  # the rest of it asks the server


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


def test_a_store_on_a_disk_is_its_folder_and_the_cache_of_a_bucket_is_for_this_user_alone(tmp_path):
    assert store_root(str(tmp_path)) == tmp_path and place_of(tmp_path) == str(tmp_path)
    assert open_store(tmp_path).folder == tmp_path
    root = store_root("s3://team/x/")
    assert root.is_relative_to(tmp_path / "cache") and place_of(root) == "s3://team/x"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["", "ftp://x/y", "S3://x", "s3:///folder", "s3://", "s3s://x", "s3:/x/y", "GS:/x"])
def test_a_place_that_is_neither_folder_nor_bucket_is_refused_before_a_folder_of_that_name_is_made(place):
    rule = "(is empty; name a folder|is no bucket; known are s3://, gs://, az://)"
    with pytest.raises(ConfigError, match=rf"store = '{place}': {rule}"):
        store_root(place)


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("s3://team/x?region=y", "has '?', so it may mean another"),
        ("s3://team/x#y", "has '#'"),
        ("s3://team/%2e%2e/x", "has '%'"),
        ("s3://team:80/x", "has ':'"),
        ("s3://key:secret@team/x", "has credentials"),
        ("s3://team/../x", "has a folder '..'"),
        ("s3://team/a//b", "has a folder ''"),
        (f"s3://team/{'x' * 201}", "1 to 200 bytes"),
    ],
)
def test_an_address_that_a_client_would_read_as_another_is_refused(place, rule):
    with pytest.raises(ConfigError) as refused:
        store_root(place)
    assert rule in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize(("given", "rule"), [("", "is empty"), (__file__, "test_addresses.py is a file")])
def test_a_cache_that_is_no_folder_is_refused(monkeypatch, given, rule):
    monkeypatch.setenv("RLHF_CACHE", given)
    with pytest.raises(ConfigError, match=rf"RLHF_CACHE = '{given}': .*{rule}; name a folder, or unset it"):
        store_root("s3://team/x")


@pytest.mark.parametrize(
    "given", ["127.0.0.1:9000", "http://", "http://x:y", "http://[::1", "http://x ", "http://k:secret@x"]
)
def test_an_endpoint_that_is_no_address_is_refused_before_the_client_panics(monkeypatch, given):
    monkeypatch.setenv("AWS_ENDPOINT_URL", given)
    said = r"AWS_ENDPOINT_URL = .*: is no address of a server; write http://"
    with pytest.raises(ConfigError, match=said) as refused:
        open_bucket("s3://team/x")
    assert "secret" not in str(refused.value)


def test_an_empty_variable_of_a_bucket_is_unset_for_the_client_which_would_sign_with_it(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "somewhere")
    for name in (empty := {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"}):
        monkeypatch.setenv(name, "")
    open_bucket("s3://team/x")
    assert not empty & set(os.environ) and os.environ["AWS_REGION"] == "somewhere"
