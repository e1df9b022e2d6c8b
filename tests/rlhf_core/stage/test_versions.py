import platform
from importlib.metadata import version

from rlhf_core.stage.versions import environment


def test_the_environment_names_python_and_the_libraries():
    assert environment()["python"] == platform.python_version()
    assert environment()["pydantic"] == version("pydantic")
