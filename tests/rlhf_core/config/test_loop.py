"""The loop's configuration: what counts for the key, and its bounds."""

import pytest
from pydantic import ValidationError

from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import keyed


def test_how_often_is_saved_and_logged_is_not_in_the_key():
    assert keyed(LoopConfig(checkpoint_every=1, log_every=9)) == keyed(LoopConfig())
    assert keyed(LoopConfig(eval_every=7)) != keyed(LoopConfig())


@pytest.mark.parametrize("field", ["batch_size", "epochs", "eval_every", "checkpoint_every", "log_every"])
def test_a_count_of_zero_is_refused(field):
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        LoopConfig.model_validate({field: 0})
