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
    name_of,
    run,
    selected,
)


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
