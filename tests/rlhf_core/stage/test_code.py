"""The digests of code, and their cache between processes."""

import importlib
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlhf_core.stage import code
from rlhf_core.stage.code import CODE, module_digests, remembered_code
from rlhf_core.store import index
from rlhf_core.store.index import load_entries
from rlhf_core.store.layout import cache_folder
from rlhf_core.user_code import sources
from rlhf_core.user_code.sources import UserSource, reached_from
from rlhf_core.user_code.syntax import ANALYSES, analysis_of


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package `toys` whose `main` imports `direct` at the top and `late` inside a function."""
    folder = tmp_path / "toys"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "sub" / "__init__.py").write_text("")
    (folder / "main.py").write_text(
        '"""Doc."""\nimport os\nfrom toys.direct import f\n\ndef g(x):\n    from .sub import late\n    return late.h(f(x))\n'
    )
    (folder / "direct.py").write_text("def f(x):\n    return x + 1\n")
    (folder / "sub" / "late.py").write_text("def h(x):\n    return x * 2\n")
    (folder / "unused.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return folder


def test_code_covers_all_our_modules_that_are_imported_even_inside_functions(package):
    found = module_digests("toys.main", ("toys",))
    assert sorted(found) == ["toys", "toys.direct", "toys.main", "toys.sub", "toys.sub.late"]
    assert not [name for name in sys.modules if name.startswith("toys")], "digesting must not import"


def test_code_of_a_late_import_changes_the_digest_and_is_named(package):
    before = module_digests("toys.main", ("toys",))
    (package / "sub" / "late.py").write_text("def h(x):\n    return x * 3\n")
    after = module_digests("toys.main", ("toys",))
    assert [name for name in before if before[name] != after[name]] == ["toys.sub.late"]


def test_a_package_that_looks_up_its_modules_imports_them_all(package):
    (package / "sub" / "__init__.py").write_text("import pkgutil\nFOUND = list(pkgutil.iter_modules(__path__))\n")
    (package / "sub" / "method.py").write_text("z = 1\n")
    before = module_digests("toys.main", ("toys",))
    assert sorted(before) == ["toys", "toys.direct", "toys.main", "toys.sub", "toys.sub.late", "toys.sub.method"]
    (package / "sub" / "method.py").write_text("z = 2\n")
    (package / "sub" / "new.py").write_text("")
    after = module_digests("toys.main", ("toys",))
    assert {name for name in after if before.get(name) != after[name]} == {"toys.sub.method", "toys.sub.new"}


def test_comments_and_docstrings_do_not_change_the_digest_and_decorators_do(package):
    before = module_digests("toys.main", ("toys",))
    (package / "direct.py").write_text(
        '"""New text."""\nimport functools\n'.replace("import functools\n", "")
        + '\n# a comment\n\ndef f(x):\n    """What it does."""\n    return (x +\n        1)\n'
    )
    (package / "unused.py").write_text("y = 2\n")
    assert module_digests("toys.main", ("toys",)) == before
    (package / "direct.py").write_text("@staticmethod\ndef f(x):\n    return x + 1\n")
    assert module_digests("toys.main", ("toys",)) != before
    (package / "direct.py").write_text("def f(x):\n    return x + 1.0\n")
    assert module_digests("toys.main", ("toys",)) != before


def test_the_store_itself_is_not_part_of_a_stages_code():
    found = module_digests("tests.support.toy_stage")
    assert "rlhf_core.schema.base" in found and "rlhf_core.types" in found
    assert "rlhf_core.stage.run" not in found and "rlhf_core.store.artifacts" not in found


# ---------------------------------------------------------------- the cache of analyses


def _never(*_: object) -> None:
    raise AssertionError("code was parsed although its analysis is known")


@pytest.fixture
def module(tmp_path, monkeypatch) -> Path:
    """A module `kept_code`, whose analysis no process knows yet."""
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "kept_code.py"
    file.write_text("import os\nDEPENDS_ON = ('env:MODEL',)\ndef reward(): ...\n")
    return file


def analyses() -> tuple[dict[str, str], UserSource]:
    """The analyses of `kept_code` in a new process: as a module of this program, and as a user's."""
    ANALYSES.clear()
    with remembered_code():
        return module_digests("kept_code", ("kept_code",)), reached_from("kept_code")[0].source


def test_code_that_another_process_has_analysed_is_not_parsed_again(module, monkeypatch):
    first = analyses()
    assert first[1].functions == ("reward",) and first[1].declared == ("env:MODEL",)
    (module.parent / "copy").mkdir()
    module.rename(module.parent / "copy" / module.name)  # the same content in another place
    monkeypatch.syspath_prepend(module.parent / "copy")
    for parser in (code, sources):
        monkeypatch.setattr(parser, "parse_source", _never)
    assert analyses() == first


def test_code_with_another_content_is_parsed_again_whatever_its_size_and_time(module):
    first, before = analyses(), module.stat()
    module.write_text(module.read_text().replace("reward", "amount"))
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert module.stat().st_size == before.st_size
    second = analyses()
    assert second[0] != first[0] and second[1].digest != first[1].digest and second[1].functions == ("amount",)


def test_code_that_an_earlier_version_of_this_program_has_analysed_is_parsed_again(module, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr("rlhf_core.user_code.syntax._analyser", lambda file: "an earlier version")
        earlier.setattr(code, "digest_without_texts", lambda tree: "another digest")
        assert analyses()[0] == {"kept_code": "another digest"}
    assert analyses()[0] != {"kept_code": "another digest"}


def test_the_same_content_as_a_module_and_as_a_package_has_two_analyses(module):
    folder = module.parent / "pack"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept.py").write_text("from . import other\n")
    ANALYSES.clear()
    with remembered_code():
        assert reached_from("pack.kept")[0].source.imports == ("pack", "pack.other")
        (folder / "kept.py").rename(folder / "kept" / "__init__.py")
        assert reached_from("pack.kept")[0].source.imports == ("pack", "pack.kept", "pack.kept.other")


@pytest.mark.parametrize("harm", ["missing", "empty", "cut", "changed", "older", "no text", "a folder"])
def test_a_cache_of_code_that_is_damaged_or_of_another_version_is_made_anew(module, harm):
    first = analyses()
    file = cache_folder() / CODE
    sound = file.read_bytes()
    wrong = sound.replace(first[1].digest.encode(), b"0" * 64)  # of a version that computes other digests
    harmed = {"empty": b"", "cut": sound[:-1], "changed": wrong, "no text": b"\xff" + sound, "older": b"0" + wrong}
    if harm in harmed:
        file.write_bytes(harmed[harm])
    else:
        file.unlink()
    if harm == "a folder":
        (file / "inside").mkdir(parents=True)
    assert analyses() == first
    assert harm == "a folder" or file.read_bytes() == sound


def test_code_is_analysed_by_another_version_of_the_analysis(module, monkeypatch):
    analyses()
    parsed: list[str] = []
    monkeypatch.setattr(index, "_maker", lambda: "another")
    parse = code.parse_source
    monkeypatch.setattr(code, "parse_source", lambda *given: (parsed.append(given[1]), parse(*given))[1])
    analyses()
    assert parsed == [str(module)]


@pytest.mark.parametrize("folder", ["", __file__, f"{__file__}/inside", "/proc/rlhf", "~no-such-user/cache"])
def test_code_is_analysed_without_a_cache_where_none_can_be_written(module, monkeypatch, folder):
    first = analyses()
    monkeypatch.setenv("RLHF_CACHE", folder)
    assert analyses() == first


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_code_is_analysed_where_this_user_may_read_the_cache_but_not_write_it_or_not_even_look(module, monkeypatch):
    first, content = analyses(), module.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("RLHF_CACHE", f"{folder}/inside")
        for mode in (0o555, 0o000):
            Path(folder).chmod(mode)
            os.seteuid(65534)
            try:
                ANALYSES.clear()
                with remembered_code():
                    again = analysis_of(module, "", content, sources._analyse_code)
            finally:
                os.seteuid(0)
            assert again[0] == first[1].digest and not list(Path(folder).iterdir())


def test_processes_that_save_at_the_same_time_leave_a_sound_cache_with_the_latest_code(module):
    begin = threading.Barrier(8)

    def analyse(number: int) -> None:
        with remembered_code():
            begin.wait()
            for version in range(20):
                analysis_of(module, "", f"def f{number}_{version}(): ...\n".encode(), sources._analyse_code)

    ANALYSES.clear()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(analyse, range(8)))
    kept = load_entries(cache_folder() / CODE)
    assert kept and all(ANALYSES[key] == analysis for key, analysis in kept.items())
    assert [file.name for file in cache_folder().iterdir()] == [CODE]


def test_the_cache_of_code_keeps_what_was_used_last(module, monkeypatch):
    monkeypatch.setattr(code, "MOST_CODE", 3)
    analyses()  # two analyses
    for number in range(2):
        ANALYSES.clear()
        with remembered_code():
            analysis_of(module, "kept_code", module.read_bytes(), sources._analyse_code)
            analysis_of(module, "", b"A = %d\n" % number, sources._analyse_code)
    kept = load_entries(cache_folder() / CODE)
    assert [functions for *_, functions in kept.values()] == [[], ["reward"], []]  # A = 0, the module of a user, A = 1
