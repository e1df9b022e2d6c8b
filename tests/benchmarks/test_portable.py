from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import portable
from benchmarks.portable import (
    NEUTRAL,
    NOT_NUMERIC,
    SETTINGS,
    SETTINGS_OF_SEVERAL,
    SEVERAL_PROCESSES,
    TESTS,
    Outcome,
    main,
    name_of,
    read,
    run,
    selected,
)

REPORT = """<testsuites><testsuite>
<testcase classname="tests.a" name="one"><properties><property name="closest" value="0.250"/></properties></testcase>
<testcase classname="tests.a" name="two"><properties><property name="closest" value="0.750"/></properties></testcase>
<testcase classname="tests.a" name="three"><failure message="no"/></testcase>
<testcase classname="tests.a" name="four"><skipped/></testcase>
</testsuite></testsuites>"""

GOOD = "<testsuites><testsuite><testcase classname='tests.a' name='one'/></testsuite></testsuites>"


def test_a_report_is_counted_and_its_closest_comparison_named() -> None:
    outcome = read(REPORT, seconds=1.0, output="")
    assert (outcome.passed, outcome.failed, outcome.skipped) == (2, ("tests.a::three",), 1)
    assert outcome.closest == (0.75, "tests.a::two")
    assert not outcome.good


def test_no_test_at_all_is_not_good() -> None:
    assert not read("<testsuites/>", seconds=1.0, output="").good


def test_every_selection_is_of_tests_that_exist_and_of_settings_that_differ() -> None:
    root = Path(portable.__file__).parents[1]
    for name, tests in TESTS.items():
        assert all((root / test).exists() for test in tests)
        assert len({name_of(setting) for setting in SETTINGS[name]}) == len(SETTINGS[name])
        assert all(set(setting) <= set(NEUTRAL) for setting in SETTINGS[name])
    assert all((root / test).is_file() for test in (*SEVERAL_PROCESSES, *NOT_NUMERIC))
    assert all(setting in SETTINGS["full"] for setting in SETTINGS_OF_SEVERAL)
    with_all = [setting for setting in SETTINGS["full"] if len(selected("full", setting)) == len(TESTS["full"]) + 1]
    assert with_all == list(SETTINGS_OF_SEVERAL)


def test_continuous_integration_runs_all_tests_with_the_kernels_of_the_setting_with_all_of_them() -> None:
    script = Path(portable.__file__).parents[1] / ".ci/run"
    assert f"env {name_of(portable.ALL)} make test SELECT=changed" in script.read_text(encoding="utf-8")


def test_a_setting_reaches_the_tests_and_what_is_set_here_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AVX512")
    probe = tmp_path / "test_probe.py"
    probe.write_text(
        "import os\nimport pytest\n"
        "def test_probe():\n"
        "    assert os.environ['OMP_NUM_THREADS'] == '2' and 'MKL_CBWR' not in os.environ\n"
        "    assert 1.0 == pytest.approx(1.0 + 1e-6, abs=2e-6)\n"
    )
    outcome = run({"OMP_NUM_THREADS": "2"}, [str(probe)], workers=1)
    assert outcome.good, outcome.output
    assert outcome.closest[0] == pytest.approx(0.5, abs=1e-3)


def test_the_table_has_a_line_for_each_setting_and_one_failure_fails_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(setting: Mapping[str, str], tests: Sequence[str], *, workers: int) -> Outcome:
        return read(REPORT if setting.get("OMP_NUM_THREADS") == "2" else GOOD, seconds=2.0, output="why it failed")

    monkeypatch.setattr(portable, "run", ran)
    assert main(["--only", "MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1"]) == 0
    assert main(["--only", "MKL_CBWR=COMPATIBLE"]) == 1
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3 + 5 and "why it failed" in said.err
    with pytest.raises(SystemExit):
        main(["--only", "another machine"])
