"""Define the values that flow between stages, sampler, rewards and trainer, without tensors, clients or torch.

Per-token sequences of a sample all have the length L of `token_ids` and are aligned with it: `logprobs[t]` is
log p(token t | tokens < t), `values[t]` is the value of the state *before* token t, `loss_mask[t]` is whether
token t is trained on (an action). Position 0 has no prediction: its log-prob is 0.0 and its mask is 0. They are
columns; tuples and arrays are converted to columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict

from rlhf_core.columns import Column as Column
from rlhf_core.columns import floats as floats
from rlhf_core.columns import hold
from rlhf_core.columns import ids as ids
from rlhf_core.columns import joined as joined
from rlhf_core.columns import mask as mask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CHAMPION = "champion"
"""Name in reports, and alias in the registry, of the policy that is in use."""
FEWEST_PROMPTS = 6
"""The fewest prompts that can show anything at 95 %: n of n in one direction have p = 2 * 0.5^n, below 0.05 from 6 on."""
FinishReason: TypeAlias = Literal["stop", "length"]
NO_EXPERTS = Column[int]("h", ())
"""The record of a completion whose experts were not recorded."""
T = TypeVar("T")


# ---------------------------------------------------------------- between stages: artifact handles


class ArtifactRef(BaseModel):
    """A frozen, JSON-serializable handle to an immutable folder in the store (or to a folder inside one).

    `uri` is the location (`store://<object digest>[/<folder>]`), `digest` the sha256 over the folder's files; only the
    digest enters the key of a stage. `parents` are the digests of the artifacts that it was made from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    uri: str
    digest: str
    parents: tuple[str, ...] = ()


class ModelRef(ArtifactRef):
    """A decoder in Hugging Face layout with its tokenizer and chat template: a policy, or one with a scalar head."""


class PolicyRef(ModelRef):
    """A causal language model with its tokenizer and chat template, in Hugging Face layout (safetensors)."""


class RewardModelRef(ModelRef):
    """A sequence classifier with one output, its tokenizer and `contract.json` (template, lengths, probe scores)."""


class ProcessRewardModelRef(RewardModelRef):
    """A reward model that scores each step of an answer at the step's last token, as its `contract.json` describes."""


class DemonstrationsRef(ArtifactRef):
    """Parquet of conversations to imitate: `train.parquet`, `eval.parquet`; column `messages`."""


class PreferencesRef(ArtifactRef):
    """Parquet of pairs: `train.parquet`, `eval.parquet`; columns `prompt`, `chosen`, `rejected` (messages), `margin`.

    Answers that were judged alone and are in no pair are in `feedback_train.parquet`, `feedback_eval.parquet`.
    """


class StepsRef(ArtifactRef):
    """Parquet of judged answers: `train.parquet`, `eval.parquet`; columns `prompt` (messages), `steps`, `labels`."""


class PromptsRef(ArtifactRef):
    """Parquet `prompts.parquet` of `Prompt` values."""


class GenerationsRef(ArtifactRef):
    """Parquet shards of unscored `Generation` values."""


class RolloutsRef(GenerationsRef):
    """Parquet shards of scored `Rollout` values; they are generations too, and can be scored again."""


class ReportRef(ArtifactRef):
    """`report.json` with its figures, and `report.html` if the report is for people."""


class ComparisonsRef(ArtifactRef):
    """Parquet `comparisons.parquet` of pairs of answers that annotators are to judge."""


class PublishedRef(ArtifactRef):
    """A gate decision, a model card, and the resulting name and version in the registry."""


class PreparedDataRef(ArtifactRef):
    """The output of `prepare_data`: one object whose folders have their own handles, so that each one counts alone."""

    demonstrations: DemonstrationsRef | None = None
    preferences: PreferencesRef | None = None
    prompts: PromptsRef | None = None
    eval_prompts: PromptsRef | None = None
    base: PolicyRef | None = None
    steps: StepsRef | None = None


def kind_of(ref: type[ArtifactRef]) -> str:
    """Name a kind of artifact in words.

    >>> kind_of(PolicyRef), kind_of(RewardModelRef)
    ('policy', 'reward model')
    """
    return "".join(f" {one.lower()}" if one.isupper() else one for one in ref.__name__.removesuffix("Ref")).strip()


def title(ref: type[ArtifactRef]) -> str:
    """Name a kind of artifact in words, with its article.

    >>> title(PolicyRef), title(ArtifactRef)
    ('a policy', 'an artifact')
    """
    words = kind_of(ref)
    return words if words.endswith("s") else f"an {words}" if words[0] in "aeiou" else f"a {words}"


# ---------------------------------------------------------------- data to sampler to reward


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    >>> Message("user", "What is 2+2?").role
    'user'
    """

    role: str
    content: str
    tool_fields: str = ""
    """JSON object of further fields that templates read: `tool_calls`, `name` and `tool_call_id` of a result, and in the first
    turn `tools`, the schemas that are shown to the policy. Only demonstrations have them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be answered. `label` is the reference for a verifiable reward (JSON or text).

    `conversational` (TRL's word) is true if the data had it as a list of turns, not as text.
    """

    id: str
    messages: tuple[Message, ...]
    label: str
    source: str
    conversational: bool = False


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """A request for one completion: the rendered prompt and the seed of this sample alone.

    `max_tokens` lowers the limit of the sampling configuration; 0 keeps it. With `routed_experts` the completion records
    the experts of its tokens.
    """

    prompt_ids: Column[int]
    seed: int
    max_tokens: int = 0
    routed_experts: bool = False

    def __post_init__(self) -> None:
        hold(self, prompt_ids="i")


@dataclass(frozen=True, slots=True)
class ActionSpan:
    """Tokens `start` to `end` (exclusive) of a completion, sampled in one call by one version of the policy.

    `reward` is the environment's reward for them; the reward of a whole episode is stored in its last span.

    >>> ActionSpan(0, 3, policy_version=7, reward=0.5).end
    3
    """

    start: int
    end: int
    policy_version: int
    reward: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The sampler's output, never edited or retokenized. `token_ids` includes the end token if it was sampled.

    `logprobs` has one entry per token: the sampler's processed log-probability (after temperature and filters).

    For an episode of several turns, or an answer written by several versions of the policy, `spans` lists the sampled
    tokens; all others come from an environment and have log-probability 0. Without spans all tokens were sampled, by
    `policy_version`. `failure` is the reason why an episode could not finish; it is counted and never trained on. `extras` are
    metrics that an environment reports. `score` is an agent's score of the episode besides its reward, or None; it
    decides whether dynamic sampling keeps the prompt. `routed_experts`, if recorded, are the experts of the prompt's
    tokens and of these, layer by layer and int16: the same number for each token, and -1 where no record exists.
    """

    token_ids: Column[int]
    logprobs: Column[float]
    text: str
    finish_reason: FinishReason
    policy_version: int
    seed: int
    spans: tuple[ActionSpan, ...] = ()
    failure: str = ""
    extras: dict[str, float] = field(default_factory=dict)
    score: float | None = None
    routed_experts: Column[int] = NO_EXPERTS

    def __post_init__(self) -> None:
        hold(self, token_ids="i", logprobs="f", routed_experts="h")
        if len(self.token_ids.data) != len(self.logprobs.data):
            raise ValueError(f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs; each token needs one")
        if not self.spans:
            return
        bounds = [bound for span in self.spans for bound in (span.start, span.end)]
        if bounds != sorted(bounds) or not 0 <= bounds[0] <= bounds[-1] <= len(self.token_ids):
            raise ValueError(f"spans = {bounds}: must follow each other within the {len(self.token_ids)} tokens")

    @property
    def action_mask(self) -> Column[int]:
        """One entry per token: 1 if it was sampled, 0 if an environment wrote it.

        >>> Completion((5, 6, 7), (-0.1, 0.0, -0.2), "", "stop", 0, 1, (ActionSpan(0, 1, 0), ActionSpan(2, 3, 0))).action_mask
        (1, 0, 1)
        """
        if not self.spans:
            return mask(b"\1" * len(self.token_ids))
        made = bytearray(len(self.token_ids))
        for span in self.spans:
            made[span.start : span.end] = b"\1" * (span.end - span.start)
        return mask(made)


@dataclass(frozen=True, slots=True)
class Generation:
    """A completion with its prompt."""

    prompt: Prompt
    prompt_ids: Column[int]
    completion: Completion

    def __post_init__(self) -> None:
        hold(self, prompt_ids="i")


def answered(prompt: Prompt, text: str) -> Generation:
    """Wrap an answer without tokens, for a text that no policy sampled."""
    return Generation(prompt, ids(()), Completion(ids(()), floats(()), text, "stop", policy_version=0, seed=0))


@dataclass(frozen=True, slots=True)
class Rollout(Generation):
    """A scored generation. Selection and training use `reward`; `reward_components` holds its parts.

    A component that does not apply is left out. `invalid` is the reason for a missing reward (`reward` is then NaN):
    such a rollout is counted, and neither selected nor trained on. `score` comes from the only term of the reward and
    guides dynamic sampling; it is None if the term gives none, or if the reward has several terms.
    """

    reward: float
    reward_components: dict[str, float]
    invalid: str = ""
    score: float | None = None


# ---------------------------------------------------------------- advantage to collate: one row of a training batch


@dataclass(frozen=True, slots=True)
class TokenSample:
    """A sequence to train on with supervision, or to score.

    >>> TokenSample(token_ids=(5, 7, 2), loss_mask=(0, 1, 1)).token_ids
    (5, 7, 2)
    """

    token_ids: Column[int]
    loss_mask: Column[int]

    def __post_init__(self) -> None:
        hold(self, token_ids="i", loss_mask="B")
        lengths = {name: len(getattr(self, name)) for name in self.__dataclass_fields__}
        if set(lengths.values()) != {len(self.token_ids)}:
            raise ValueError(f"{type(self).__name__}: {lengths}: every field has one entry per token; align them first")

    def until_trained(self) -> Column[int]:
        """The tokens up to the last trained one, where a sampled answer ends too: templates add more."""
        return self.token_ids[: len(self.loss_mask) - self.loss_mask[::-1].index(1)]


@dataclass(frozen=True, slots=True)
class RewardPair:
    """Two whole conversations (prompt and answer); a reward model should score `chosen_ids` higher by `margin`."""

    chosen_ids: Column[int]
    rejected_ids: Column[int]
    margin: float

    def __post_init__(self) -> None:
        hold(self, chosen_ids="i", rejected_ids="i")


@dataclass(frozen=True, slots=True)
class StepSample(TokenSample):
    """An answer with judged steps: at each step's last token the mask is 1 and `labels` holds P(the step is right).

    >>> StepSample(token_ids=(5, 7, 2), loss_mask=(0, 1, 1), labels=(0.0, 1.0, 0.3)).labels[2]
    0.3
    """

    labels: Column[float]

    def __post_init__(self) -> None:
        hold(self, labels="d")
        TokenSample.__post_init__(self)  # super() does not find a class with slots


@dataclass(frozen=True, slots=True)
class PreferenceSample:
    """A pair for DPO and related losses, with the reference's summed log-probability of each answer's masked tokens."""

    chosen: TokenSample
    rejected: TokenSample
    ref_chosen_logprob: float
    ref_rejected_logprob: float


@dataclass(frozen=True, slots=True)
class AnswerSample:
    """An answer, desirable or not, and for KTO its prompt with the answer to another prompt (`mismatched`).

    Both come with the reference's summed log-probability of their masked tokens. BCO has no use for the second one,
    which is then the answer itself.
    """

    answer: TokenSample
    desirable: bool
    ref_logprob: float
    mismatched: TokenSample
    ref_mismatched_logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """A teacher's distributions at the T masked tokens of one sample, each reduced to its K likeliest tokens.

    For whole distributions K is the size of the vocabulary, in its order, and `ids` is empty.
    """

    logprobs: NDArray[np.float32]
    """Log-probabilities [T, K] of the full softmax, not renormalized over the K tokens."""
    ids: NDArray[np.int32]
    """Token ids [T, K], or [T, 0] for the whole vocabulary."""
    token_logprobs: NDArray[np.float32]
    """Log-probabilities [T] of the masked tokens themselves, whether or not they are among the K."""


@dataclass(frozen=True, slots=True, eq=False)
class DistillationSample:
    """A sequence for distillation with each teacher's distribution at each masked token, in token order."""

    token_ids: Column[int]
    loss_mask: Column[int]
    teachers: tuple[TopLogprobs, ...]

    def __post_init__(self) -> None:
        hold(self, token_ids="i", loss_mask="B")
        rows = [len(part) for teacher in self.teachers for part in (teacher.logprobs, teacher.ids)]
        lengths = (len(self.token_ids), len(self.loss_mask), *rows)
        if lengths != (lengths[0], lengths[0], *(self.loss_mask.count(1) for _ in rows)):
            raise ValueError(
                f"DistillationSample: {lengths}: the mask has one entry per token, a teacher one row per masked token; "
                "align them first"
            )


def derive_seed(*parts: int | str) -> int:
    """Derive a 31-bit seed that depends only on `parts` (sha256), so call order and restarts do not matter.

    >>> derive_seed(17, "ppo", 3, "prompt-1", 0) == derive_seed(17, "ppo", 3, "prompt-1", 0)
    True
    """
    digest = hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def chunks(rows: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split rows into parts of `size`, in order. The last part may have fewer.

    >>> chunks([1, 2, 3], 2)
    [[1, 2], [3]]
    """
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# ---------------------------------------------------------------- text


def label_fields(label: str) -> dict[str, Any]:
    """Parse the fields of a label that is a JSON object; none for another one.

    >>> label_fields('{"level": 3}'), label_fields("4"), label_fields("{not JSON")
    ({'level': 3}, {}, {})
    """
    if not label.lstrip().startswith("{"):
        return {}
    try:
        fields: dict[str, Any] = json.loads(label)
    except (ValueError, RecursionError):  # no JSON, or a number too long or brackets too deep to be read
        return {}
    return fields


def encodable(text: str) -> str:
    """Replace each lone surrogate in `text` by a question mark: no tokenizer or file accepts one.

    JSON may contain lone surrogates, so policies, users' programs and servers may send them.

    >>> encodable("caf\u00e9 \\ud83d")
    'caf\u00e9 ?'
    """
    return text.encode(errors="replace").decode()


def plain_text(text: str) -> str:
    """Convert `text` to a plain `str`: the parent process cannot load a user's subclass, such as an enum of roles.

    Lone surrogates are replaced, see `encodable`. Raises TypeError if it is not a string.
    """
    return encodable(str.__str__(text))
