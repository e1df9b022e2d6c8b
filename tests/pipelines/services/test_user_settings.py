import os
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipelines.services import home as user_settings
from pipelines.services.home import Home, client_environment, quiet_environment
from rlhf_core.errors import ConfigError

CLOUD = "https://api.prefect.cloud/api/accounts/a/workspaces/w"
POSTGRES = "postgresql+asyncpg://me:hunter2@db:5432/prefect"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
SERVER_SETTINGS = """
from prefect.settings import get_current_settings
settings = get_current_settings()
url = settings.server.database.connection_url
print(settings.api.url, settings.api.key and settings.api.key.get_secret_value(), url and url.get_secret_value())
"""


@pytest.fixture(autouse=True)
def _nothing_set(tmp_path, monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PREFECT", "MLFLOW", "RLHF_OWN"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def write_profile(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "profiles.toml").write_text(
        f'active = "local"\n[profiles.local]\n[profiles.cloud]\nPREFECT_API_URL = "{CLOUD}"\nPREFECT_API_KEY = "pnu_1"\n'
        f'[profiles.shared]\n{DATABASE} = "{POSTGRES}"\n'
    )


def test_a_server_is_found_in_all_the_places_where_prefect_looks(tmp_path, monkeypatch):
    assert user_settings.prefect_api() == ""
    write_profile(tmp_path / ".prefect")
    assert user_settings.prefect_api() == ""
    monkeypatch.setenv("PREFECT_PROFILE", "cloud")
    assert user_settings.prefect_api() == CLOUD
    (tmp_path / "pyproject.toml").write_text('[tool.prefect.api]\nurl = "http://pyproject/api/"\n')
    assert user_settings.prefect_api() == "http://pyproject/api"
    (tmp_path / "prefect.toml").write_text('[api]\nurl = "http://toml/api"\n')
    assert user_settings.prefect_api() == "http://toml/api"
    (tmp_path / ".env").write_text("PREFECT_API_URL=http://dotenv/api\n")
    assert user_settings.prefect_api() == "http://dotenv/api"
    monkeypatch.setenv("PREFECT_API_URL", "http://environment/api")
    assert user_settings.prefect_api() == "http://environment/api"
    monkeypatch.setenv("PREFECT_API_URL", "")
    assert user_settings.prefect_api() == "http://dotenv/api"


def test_a_file_that_cannot_be_read_is_refused_and_not_passed_over(tmp_path):
    (tmp_path / "prefect.toml").write_text("[api\n")
    with pytest.raises(ConfigError, match=r"prefect\.toml.*is not valid TOML"):
        user_settings.prefect_api()


def test_a_profile_in_the_users_own_prefect_home_is_found(tmp_path, monkeypatch):
    write_profile(tmp_path / "mine")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "mine"))
    monkeypatch.setenv("PREFECT_PROFILE", "cloud")
    assert user_settings.prefect_api() == CLOUD
    # ... and by a process of ours too, whose PREFECT_HOME is the state folder
    for name, value in quiet_environment(Home(tmp_path / "home")).items():
        monkeypatch.setenv(name, value)
    assert user_settings.prefect_api() == CLOUD


def test_what_we_gave_to_our_own_processes_does_not_pass_for_the_users(tmp_path, monkeypatch):
    for name, value in client_environment(Home(tmp_path / "one"), prefect_port=4201).items():
        monkeypatch.setenv(name, value)
    assert user_settings.prefect_api() == "" and not user_settings.has_prefect_database()
    other = quiet_environment(Home(tmp_path / "two"))
    assert str(tmp_path / "two") in other[DATABASE]
    monkeypatch.setenv("PREFECT_API_URL", "http://theirs/api")  # exported later, in the same shell
    assert user_settings.prefect_api() == "http://theirs/api"
    for name, value in client_environment(Home(tmp_path / "one"), prefect_api="http://theirs/api").items():
        monkeypatch.setenv(name, value)
    assert user_settings.prefect_api() == "http://theirs/api"


def test_what_we_gave_to_a_process_is_none_of_the_users_in_those_that_it_starts_for_another_state_folder(
    tmp_path, monkeypatch
):
    for name, value in client_environment(Home(tmp_path / "one"), prefect_port=4201).items():
        monkeypatch.setenv(name, value)
    for name, value in quiet_environment(
        Home(tmp_path / "two")
    ).items():  # it names no server, and leaves that of `one`
        monkeypatch.setenv(name, value)
    assert os.environ["PREFECT_API_URL"] == "http://127.0.0.1:4201/api" and user_settings.prefect_api() == ""


@pytest.mark.parametrize("name", [DATABASE, "PREFECT_API_DATABASE_CONNECTION_URL"])
def test_a_database_of_the_users_is_what_a_server_of_ours_is_started_with(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, POSTGRES)
    given = os.environ | client_environment(Home(tmp_path / "home"), prefect_port=4200)
    assert given[name] == POSTGRES
    assert [value for key, value in given.items() if key.endswith("DATABASE_CONNECTION_URL")] == [POSTGRES]
    assert POSTGRES not in given[user_settings.OWN]


@pytest.mark.parametrize(
    ("name", "url", "rule"),
    [
        (DATABASE, "postgresql://me:hunter2@db/prefect", "write it as postgresql\\+asyncpg"),
        (DATABASE, "sqlite:///mine.db", "write it as postgresql\\+asyncpg"),
        (
            "PREFECT_API_DATABASE_CONNECTION_URL",
            "postgresql+psycopg2://me:hunter2@db/p",
            "write it as postgresql\\+asyncpg",
        ),
        ("MLFLOW_TRACKING_URI", "mysql+pymysql://me:hunter2@db/mlflow", "driver pymysql is not installed; pip install"),
        ("MLFLOW_TRACKING_URI", "postgres://me:hunter2@db/mlflow", "is no address of a database; pip install"),
        ("MLFLOW_TRACKING_URI", "postgresql://me:hunter2@db:port/mlflow", "is no address of a database"),
        ("MLFLOW_TRACKING_URI", "postgresql+asyncpg://me:hunter2@db/mlflow", "cannot use asyncpg, an asynchronous"),
        (DATABASE, POSTGRES, ""),
        ("MLFLOW_TRACKING_URI", "sqlite:///mine.db", ""),
        ("MLFLOW_TRACKING_URI", "file:///runs", "MLflow no longer writes to folders; name a database"),
        ("MLFLOW_TRACKING_URI", "mlruns", "MLflow no longer writes to folders"),
        ("MLFLOW_TRACKING_URI", "", ""),
    ],
)
def test_a_database_that_no_server_can_open_is_refused_before_one_is_started(monkeypatch, name, url, rule):
    monkeypatch.setenv(name, url)
    refused = pytest.raises(ConfigError, match=f"^{name} = .*{rule}") if rule else nullcontext()
    with refused as raised:
        user_settings.check_databases()
    assert "hunter2" not in str(raised)


def test_prefect_itself_reads_key_and_database_of_the_profile_in_a_process_of_ours(tmp_path, monkeypatch):
    write_profile(tmp_path / ".prefect")

    def read(environment: dict[str, str]) -> list[str]:
        command = [sys.executable, "-c", SERVER_SETTINGS]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
        return done.stdout.split()

    monkeypatch.setenv("PREFECT_PROFILE", "cloud")
    home = Home(tmp_path / "home")
    assert read(client_environment(home, prefect_api=user_settings.prefect_api()))[:2] == [CLOUD, "pnu_1"]
    monkeypatch.setenv("PREFECT_PROFILE", "shared")
    assert read(client_environment(home, prefect_port=4200)) == ["http://127.0.0.1:4200/api", "None", POSTGRES]


def test_a_tracking_server_is_one_that_is_reached_over_the_network(monkeypatch):
    for uri, remote in {"http://mlflow:5000": True, "databricks": True, "sqlite:///mine.db": False, "": False}.items():
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert user_settings.remote_tracking_uri() == (uri if remote else "")
        assert user_settings.tracking_store() == ("" if remote else uri)


def test_what_reads_dotenv_files_is_declared_and_not_only_there_by_way_of_another_package():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert "python-dotenv" in project["dependencies"]
