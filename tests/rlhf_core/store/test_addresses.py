"""Odd addresses of stores and of servers: each works or is one error, and no client fails on it later."""

import os
import random
import re
import socket
import stat
from collections.abc import Iterator

import httpx
import obstore.store
import pytest
from obstore.store import from_url
from pydantic import TypeAdapter, ValidationError

from rlhf_core.config.agents import NemoGymAgent
from rlhf_core.config.runtime import VllmServerSamplerConfig
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.schema.base import HttpAddress
from rlhf_core.store import addresses, bucket_server, opening
from rlhf_core.store.addresses import open_bucket
from rlhf_core.store.opening import check_writable, open_store, place_of, store_root

ENDPOINTS = {"AWS_ENDPOINT_URL": "s3", "AZURE_STORAGE_ENDPOINT": "az", "GOOGLE_BASE_URL": "gs"}
COUNTS = [200, pytest.param(10_000, marks=pytest.mark.full)]
SIGNS = " \t\n\x7f/:@?#%[]{}\\.~*-_$&+='\"\u00e9\u202e\ud800\U0001f4a5aZ09"
Parts = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
"""Usual and odd beginnings, middles and ends of addresses."""
STORES: Parts = (
    (("s3://", "s3://", "gs://", "az://"), (
        *("S3://", "s3:/", "http://", "file://", "", "~", "~/", "~nosuchuser", "/", "\\"),
        *("/dev/null", "/dev/null/", "/etc/passwd/", "/proc/self/fd/0", "./"),
    )),
    (
        ("bucket", "my-bucket", "team.data", "a_b"),
        (
            "[x", "[::1]", "a@b", "k:s@b", "%41", "a b", "", "..", ".", "a..b", "-", "\u00e9", "\0", "x" * 300, "b:80", "_",
            "A", "b?c=1", "*", "\u202e", "\ud800", "xn--a", "acct.blob.core.windows.net",
        ),
    ),
    (("", "/x", "/x/y", "/team/kept/"), ("/", "//", "/..", "/a b", "/%2e", "/\U0001f4a5", " ", "/" + "x" * 300)),
)  # fmt: skip
SERVERS: Parts = (
    (("http://", "https://"), ("HTTP://", "ftp://", "", "http:/", "//")),
    (
        ("host", "judge-1.example", "10.0.0.1:443", "host:8000", "127.0.0.1", "[::1]", "[::1]:80"),
        (
            "[::1", "::1", "[fe80::1%25eth0]", "h:80", "h:0", "h:65536", "h:-1", "h:x", "u:p@h", "h%20", "h_", "-h", "h..x",
            ".", "xn--", "xn--a", "", "\u00e9", "\n", "a b", "h?x", "h#y", "h\\x", "*", "]", "{}", "<", "\u202e", "x" * 64,
        ),
    ),
    (("", "/", "/v1", "/v1/"), ("/a b", "?x=1", "#f", "/%zz", "/\u00e9", " ", "\n", "//", "/" + "x" * 300)),
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_provider(monkeypatch, tmp_path):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_request(monkeypatch):
    """Buckets are opened; no question is sent to their servers."""
    monkeypatch.setattr(bucket_server, "probe", open_bucket)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")


@pytest.fixture
def no_network(monkeypatch):
    """Requests are made and not sent: a client may also fail on an address when it makes the first one."""

    def through_nothing(uri, *, client_options, retry_config=None):
        return from_url(
            uri, client_options=client_options | {"proxy_url": "http://127.0.0.1:0"}, retry_config={"max_retries": 0}
        )

    monkeypatch.setattr(obstore.store, "from_url", through_nothing)
    monkeypatch.setattr(opening, "PROBE_PATIENCE_S", -1.0)  # no request is repeated after seconds
    for name in ("AWS_SKIP_SIGNATURE", "GOOGLE_SKIP_SIGNATURE", "AZURE_SKIP_SIGNATURE"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")  # the bucket is in the name of the host
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")


def odd(parts: Parts, count: int) -> Iterator[str]:
    """Addresses, each of three parts of which half are usual ones; in half of them signs are put in, replaced or taken out."""
    chance = random.Random(7)
    for _ in range(count):
        address = "".join(chance.choice(chance.choice(kinds)) for kinds in parts)
        for _ in range(chance.choice((0, 0, 0, 1, 2, 3))):
            place = chance.randrange(len(address) + 1)
            sign = chance.choice((*SIGNS, "", ""))
            address = address[:place] + sign + address[place + chance.randrange(2) :]
        yield address


def in_one_line(error: RlhfError) -> bool:
    return "\n" not in str(error) and str(error).isprintable()


@pytest.mark.parametrize("count", COUNTS)
def test_an_odd_store_is_a_folder_a_bucket_or_one_error(no_network, count):
    roots = set()
    for address in odd(STORES, count):
        try:
            root = store_root(address)
            check_writable(root)
            roots.add(root)
            assert not root.exists() or root.is_dir(), repr(address)
        except RlhfError as error:
            assert in_one_line(error), repr(address)
    assert len(roots) > count / 30, "folders"


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("variable", "scheme"), ENDPOINTS.items())
def test_an_odd_endpoint_of_a_bucket_is_used_or_one_error(no_network, monkeypatch, count, variable, scheme):
    asked = 0
    for address in odd(SERVERS, count):
        # No variable can have these two.
        monkeypatch.setenv(variable, address.replace("\0", "").replace("\ud800", ""))
        with pytest.raises(RlhfError) as error:
            bucket_server.probe(f"{scheme}://bucket/folder")
        assert in_one_line(error.value), repr(address)
        asked += "did not answer" in str(error.value)
    assert count / 100 < asked < count / 2


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "named",
    [
        TypeAdapter(HttpAddress).validate_python,
        lambda address: VllmServerSamplerConfig(urls=(address,), weights_folder="/w"),
        lambda address: NemoGymAgent(url=address),
    ],
    ids=["judge", "vllm_server", "nemo_gym"],
)
def test_a_server_that_a_profile_may_name_can_be_asked(named, count):
    asked = 0
    for address in odd(SERVERS, count):
        try:
            named(address)
        except ValidationError:
            continue
        assert httpx.Request("POST", f"{address.rstrip('/')}/chat").url.host, repr(address)
        asked += 1
    assert count / 100 < asked < count / 2


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *(("AWS_REGION", "s3"), ("AWS_DEFAULT_REGION", "s3"), ("AWS_ENDPOINT_URL_S3", "s3")),
        *(("AZURE_STORAGE_ACCOUNT_NAME", "az"), ("AZURE_ENDPOINT", "az")),
    ],
)
@pytest.mark.parametrize("value", ["[x", "a b", "xn--", "::1"])
def test_an_odd_variable_of_a_bucket_is_one_error(no_network, monkeypatch, name, scheme, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"{name} = '{re.escape(value)}': is no (part|address) of a "):
        bucket_server.probe(f"{scheme}://bucket/folder")


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


@pytest.mark.parametrize("place", ["file", "file/x", "fifo", "socket", "dangling", "dangling/x/y", "loop", "/dev/null"])
def test_a_store_that_is_no_folder_is_refused(tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    os.mkfifo("fifo")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        with pytest.raises(
            ConfigError, match=rf"store = '{re.escape(place)}': cannot be a folder \(.+\); name a folder, or s3"
        ):
            store_root(place)


@pytest.mark.parametrize(
    ("scheme", "variable"), [("s3", "AWS_ACC"), ("gs", "GOOGLE_APPLICATION_C"), ("az", "AZURE_STORAGE_ACC")]
)
def test_a_bucket_without_credentials_is_refused_before_its_client_looks_for_them(
    monkeypatch, tmp_path, scheme, variable
):
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_", "GCE_", "IDENTITY_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("HOME", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as role:
        monkeypatch.setattr(addresses, "_ROLES", role.getsockname())
        open_bucket(f"{scheme}://bucket/x")
    open_bucket(f"{scheme}://bucket/y")  # nobody listens at that port now, and nobody asks it again
    monkeypatch.setattr(addresses, "_ROLES", ("127.0.0.1", 9))
    with pytest.raises(
        ConfigError, match=rf"store = '{scheme}://bucket/x': has no credentials: {variable}\w+ is not set.*; set"
    ):
        open_bucket(f"{scheme}://bucket/x")


def test_a_store_on_a_disk_is_its_folder_and_the_cache_of_a_bucket_is_for_this_user_alone(no_request, tmp_path):
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
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for name in (empty := {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"}):
        monkeypatch.setenv(name, "")
    open_bucket("s3://team/x")
    assert not empty & set(os.environ) and os.environ["AWS_REGION"] == "somewhere"
