"""Take a policy that a training exported along the way (`export_every`) and store it as a separate artifact."""

import shutil

from rlhf_core.errors import ConfigError
from rlhf_core.stage.context import StageContext
from rlhf_core.training.exports import EXPORTS, export_folder
from rlhf_core.types import PolicyRef
from stages.checkpoint import CheckpointConfig


def run(config: CheckpointConfig, *, policy: PolicyRef, context: StageContext) -> PolicyRef:
    """The policy exported after `config.step`.

    Raises ConfigError if the training of `policy` exported none at that step.
    """
    folder = export_folder(context.path(policy), config.step)
    if not folder.is_dir():
        found = sorted(one.name for one in (context.path(policy) / EXPORTS).glob("step_*"))
        rule = f"the training exported no policy after this step, but {', '.join(found) or 'none at all'}"
        raise ConfigError(f"{context.label}.step", config.step, rule, "set export_every of the training to a divisor")
    shutil.copytree(folder, context.out, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return context.commit(PolicyRef, metrics={"step": float(config.step)})
