"""Import a policy from outside in our layout, to evaluate it alongside the policies of the pipeline."""

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError
from rlhf_core.models.materialize import materialize
from rlhf_core.stage.context import StageContext
from rlhf_core.types import PolicyRef
from stages.import_policy import ImportPolicyConfig, content_digests


def run(config: ImportPolicyConfig, *, context: StageContext) -> PolicyRef:
    """Save the model as a policy: safetensors, tokenizer and chat template. Raises ConfigError if it is not usable."""
    materialize(config.model, context.out)
    ChatTemplate.load(context.out)
    if context.files and content_digests(config) != context.files:
        rule, remedy = "has changed since the run was planned", "run again when no other process writes to it"
        raise ConfigError("evaluate.baselines.model.path", config.model.path, rule, remedy)
    return context.commit(PolicyRef)
