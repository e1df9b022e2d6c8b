"""What `rlhf scaffold server` writes, checked by the programs that read it."""

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest

from rlhf_contrib.places.verb import TEMPLATES
from tests.support.team_server import program

pytestmark = pytest.mark.services
FILES = TEMPLATES / "server"
UNITS = ("rlhf-prefect.service", "rlhf-mlflow.service", "rlhf-worker.service")


def test_caddy_accepts_its_file_and_refuses_a_misspelt_directive(tmp_path):
    caddy, users, file = program("caddy"), tmp_path / "users", tmp_path / "Caddyfile"
    word = subprocess.run([caddy, "hash-password", "--plaintext", "secret"], capture_output=True, text=True, check=True)
    users.write_text(f"ada {word.stdout}")
    text = (FILES / "Caddyfile").read_text()
    for content, status in ((text, 0), (text.replace("reverse_proxy", "reverse_proxi"), 1)):
        file.write_text(content)
        command = [caddy, "validate", "--adapter", "caddyfile", "--config", str(file)]
        variables = os.environ | {"RLHF_USERS": str(users)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_a_unit_and_refuses_a_misspelt_key(unit, tmp_path):
    analyze, file = program("systemd-analyze"), tmp_path / unit
    (tmp_path / "bin").mkdir()
    for name in ("prefect", "mlflow", "rlhf"):
        (tmp_path / "bin" / name).symlink_to("/bin/true")
    text = (FILES / unit).read_text().replace("/opt/rlhf", str(tmp_path))
    for content, said in ((text, False), (text.replace("Restart=", "Restrat="), True)):
        file.write_text(content)
        done = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True, check=False)
        assert ("Restrat" in done.stdout + done.stderr) == said and (said or done.returncode == 0), done.stderr


def test_the_files_name_each_other_and_the_options_that_their_programs_have():
    from mlflow import environment_variables
    from prefect import settings

    units = "".join((FILES / unit).read_text() for unit in UNITS)
    names = set(re.findall(r"/etc/rlhf/(\S+)", units))
    assert names == {"server.env", "worker.env", "mlflow_auth.ini"} and all((FILES / name).is_file() for name in names)
    for name in ("server.env", "worker.env"):
        for variable in re.findall(r"^([A-Z_]+)=", (FILES / name).read_text(), flags=re.M):
            known = (
                hasattr(settings, variable) or hasattr(environment_variables, variable) or variable.startswith("AWS_")
            )
            assert known or variable == "MLFLOW_BACKEND_STORE_URI", f"{variable} of {name} is no setting of theirs"
    ours = configparser.ConfigParser()
    ours.read(FILES / "mlflow_auth.ini")
    theirs = Path(environment_variables.__file__).parent / "server/auth/basic_auth.ini"
    options = re.findall(r"^(?:# )?(\w+) =", theirs.read_text(), flags=re.M)
    assert set(ours["mlflow"]) <= set(options)
