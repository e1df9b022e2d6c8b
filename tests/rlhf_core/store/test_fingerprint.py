import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.store.fingerprint import (
    FileEntry,
    canonical_json,
    hash_file,
    hash_tree,
    list_files,
    sha256_text,
    tree_digest,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def test_canonical_json_has_one_text_for_one_value():
    assert canonical_json({"b": [1, 2.5, None], "a": {"y": True, "x": "é"}}) == (
        '{"a":{"x":"\\u00e9","y":true},"b":[1,2.5,null]}'
    )
    assert canonical_json((0.1, 1e-5)) == "[0.1,1e-05]"


@given(st.dictionaries(st.text(), JSON, max_size=6), st.randoms())
def test_the_order_of_names_does_not_matter(value, random):
    names = list(value)
    random.shuffle(names)
    assert canonical_json({name: value[name] for name in names}) == canonical_json(value)


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        ({"a": {"b": [1, len]}}, "a.b[1]"),
        ({"a": {1, 2}}, "a"),
        ({"a": float("nan")}, "a"),
        ({"a": [float("inf")]}, "a[0]"),
        ({"a": object()}, "a"),
        ({"a": Path("/x")}, "a"),
        ({"a": {3: 4}}, "a"),
        (b"x", "value"),
    ],
)
def test_a_value_without_a_stable_text_is_refused_with_its_place(bad, place):
    with pytest.raises(ConfigError) as caught:
        canonical_json(bad)
    assert str(caught.value).startswith(f"{place} = ")


def test_a_file_has_the_sha256_that_sha256sum_prints(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert hash_file(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hash_file(tmp_path / "a") == sha256_text("abc")


def test_a_tree_lists_every_file_with_size_and_hash(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "top.txt").write_text("abc")
    (tmp_path / "sub" / "deep" / "x").write_text("")
    assert hash_tree(tmp_path) == {
        "sub/deep/x": FileEntry(0, sha256_text("")),
        "top.txt": FileEntry(3, sha256_text("abc")),
    }


def test_a_folder_inside_a_tree_has_the_digest_of_that_folder_alone(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "w").write_text("1")
    (tmp_path / "base2").mkdir()
    (tmp_path / "base2" / "w").write_text("2")
    whole = hash_tree(tmp_path)
    assert tree_digest(whole, under="base") == tree_digest(hash_tree(tmp_path / "base"))
    assert tree_digest(whole, under="base") != tree_digest(whole, under="base2")
    # by hand: the digest of {"w": sha256("1")}
    expected = hashlib.sha256(f'{{"w":"{sha256_text("1")}"}}'.encode()).hexdigest()
    assert tree_digest(whole, under="base") == expected


def test_links_are_followed_but_for_those_without_an_end(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "w").write_text("1")
    (tmp_path / "model" / "shards").symlink_to(tmp_path / "blobs")
    (tmp_path / "model" / "again").symlink_to(tmp_path / "blobs")
    assert list_files(tmp_path / "model") == ("again/w", "shards/w")
    monkeypatch.chdir(tmp_path)
    assert list_files(Path()) == ("blobs/w", "model/again/w", "model/shards/w")
    for name in ("up", "up2"):  # two of them would be followed 2 ** 40 times
        (tmp_path / "model" / name).symlink_to(tmp_path)
    with pytest.raises(ArtifactError, match="is a link to a folder that contains it"):
        list_files(tmp_path / "model")


def test_links_that_lead_to_each_other_are_refused(tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "to").symlink_to(tmp_path / other)
    with pytest.raises(ArtifactError, match="is a link to a folder that contains it"):
        list_files(tmp_path / "a")


def test_a_pipe_and_a_link_to_nothing_are_named_and_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match=r"pipe'.*: is a pipe, a device or a socket, not a file; remove it"):
        hash_tree(tmp_path)
    (tmp_path / "pipe").unlink()
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match=r"gone.*: is a link to no file"):
        hash_tree(tmp_path)
