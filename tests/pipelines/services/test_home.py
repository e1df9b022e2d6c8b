import os
import threading
from pathlib import Path

import httpx
import pytest
from starlette.responses import PlainTextResponse

from pipelines.services import home as module
from pipelines.services.home import Home, client_environment, quiet_environment
from rlhf_core.errors import ConfigError
from tests.support.forks import forked
from tests.support.reward_servers import serving


def test_the_state_folder_is_here_unless_the_environment_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLHF_HOME", raising=False)
    assert Home.here().root == tmp_path / ".rlhf"
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "elsewhere"))
    assert Home.here().store == tmp_path / "elsewhere" / "store"
    monkeypatch.setenv("HOME", str(tmp_path))
    for named, place in (("", ".rlhf"), ("~/mine", "mine"), ("a\nb", "a\nb"), ("x" * 200, "x" * 200)):
        monkeypatch.setenv("RLHF_HOME", named)
        assert Home.here().root == tmp_path / place


@pytest.mark.parametrize(
    ("named", "rule"),
    [
        ("file", "it is no folder"),
        ("/dev/null", "it is no folder"),
        ("file/inside", "cannot be a folder"),
        ("loop/inside", "cannot be a folder"),
        ("x" * 256, "cannot be a folder"),
        ("~nobody-by-this-name/x", "cannot be a folder"),
        ("a\udcff", "cannot be a folder"),
        (f"{'x' * 100}/" * 5, "SQLite opens no database"),
        ("shared", "all users share that folder"),
    ],
)
def test_what_cannot_be_a_state_folder_is_one_error(named, rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("shared").mkdir()
    Path("shared").chmod(0o1777)
    monkeypatch.setenv("RLHF_HOME", named)
    with pytest.raises(ConfigError, match=rf"^RLHF_HOME = .*: {rule}.*; set it to a folder of your own"):
        Home.here()


def test_nothing_is_kept_outside_the_state_folder_and_nothing_is_reported(tmp_path):
    environment = quiet_environment(Home(tmp_path))
    for name in ("PREFECT_HOME", "PREFECT_RESULTS_LOCAL_STORAGE_PATH", "PREFECT_SERVER_MEMO_STORE_PATH"):
        assert Path(environment[name]).is_relative_to(tmp_path)
    assert str(tmp_path) in environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    assert (environment["DO_NOT_TRACK"], environment["MLFLOW_DISABLE_TELEMETRY"]) == ("1", "true")


def test_clients_talk_to_this_machine(tmp_path):
    environment = client_environment(Home(tmp_path), prefect_port=4321)
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4321/api"


def without_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # what exFAT answers

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("hard_links", [True, False])
def test_processes_that_ask_at_once_agree_on_the_identity_of_a_state_folder(tmp_path, monkeypatch, hard_links):
    if not hard_links:
        without_hard_links(monkeypatch)
    home, start, said = Home(tmp_path / "home"), threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        said.append(home.identity)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 8 and set(said) == {home.identity} and len(home.identity) == 12
    assert [path.name for path in home.root.iterdir()] == ["home.id"]


def test_an_identity_that_is_being_written_is_waited_for_and_one_that_never_comes_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "home.id"
    path.touch()
    writer = threading.Timer(0.3, lambda: path.write_text("0123456789ab"))
    writer.start()
    assert Home(tmp_path).identity == "0123456789ab"
    path.write_text("")
    monkeypatch.setattr(module, "ID_WAIT_S", 0.0)
    with pytest.raises(ConfigError, match=r"home\.id': is empty: its writer was killed; remove it"):
        _ = Home(tmp_path).identity


def test_a_state_folder_is_for_this_user_alone_also_one_that_was_left_open(tmp_path):
    (tmp_path / "old").mkdir(mode=0o755)
    for name in ("new", "old"):
        assert (Home(tmp_path / name).make().root.stat().st_mode & 0o777) == 0o700
    assert Home(tmp_path / "third").prefect_auth_string and (tmp_path / "third").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["a b", "a#b", "é 名", "a%b", "a&b;c", "100%", "a?b", "a%20b", "a%3fb"])
def test_a_state_folder_has_its_databases_in_it_or_is_refused(tmp_path, monkeypatch, name):
    from sqlalchemy.engine import make_url

    monkeypatch.setenv("RLHF_HOME", str(tmp_path / name))
    monkeypatch.delenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", raising=False)
    home = Home(tmp_path / name)
    prefect = quiet_environment(home)["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    if all(Path(make_url(uri).database or "").is_relative_to(home.root) for uri in (home.mlflow_uri, prefect)):
        assert Home.here() == home
    else:
        with pytest.raises(ConfigError, match=r"RLHF_HOME = .*: the address of a database cannot hold"):
            Home.here()


@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "HTTP_PROXY", "https_proxy"])
def test_a_socks_proxy_keeps_no_client_from_asking_this_machine(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    for key, value in quiet_environment(Home(tmp_path)).items():
        monkeypatch.setenv(key, value)
    with serving(PlainTextResponse("here")) as url, httpx.Client() as client:
        assert client.get(url).text == "here"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("inside", ["", "state"])
def test_the_state_folder_of_another_user_is_refused(inside, tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / inside))

    def run() -> None:
        os.setgroups([])
        os.setuid(12002)
        with pytest.raises(ConfigError, match=r"^RLHF_HOME = .*: this user may not use that folder; set it to"):
            Home.here()

    child = forked(run)
    child.start()
    child.join()
    assert child.exitcode == 0
