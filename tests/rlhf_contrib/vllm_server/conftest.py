from tests.rlhf_core.conftest import policies as policies
