"""The problems that a rehearsal finds, by class, and the outcome of each stage."""

from dataclasses import dataclass, field

from pipelines.rehearse.cut import Cut

ROWS = "rows are dropped or cut"
TEMPLATE = "the chat template drops words"
REWARD_FAILS = "a reward fails"
REWARD_CONSTANT = "a reward is constant"
REWARD_ARGUMENTS = "a reward lacks arguments"
GROUPS = "groups have no gradient"
CONTEXT = "prompts exceed the context"
GATES = "a gate reads no number"
ADAPTERS = "LoRA matches no module"
PACKAGES = "a package is missing"
UNSEEN = "the key does not see all code"
SERVERS = "a server does not respond"
STAGE = "a stage fails"


@dataclass(frozen=True)
class FoundProblem:
    """Something that would fail, or mislead, in the run itself."""

    kind: str
    text: str
    """The problem as *key = value: rule; remedy*."""


@dataclass(frozen=True)
class NodeResult:
    """The outcome of a stage of the graph."""

    label: str
    stage: str
    state: str
    """`ran`, `failed`, or `after LABEL` if it needs the result of a stage that failed."""
    seconds: float = 0.0


@dataclass
class Rehearsal:
    """The result of a rehearsal."""

    nodes: list[NodeResult] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    problems: list[FoundProblem] = field(default_factory=list)

    def add(self, kind: str, *texts: str) -> None:
        """Note problems, each once."""
        for text in texts:
            if text not in (problem.text for problem in self.problems):
                self.problems.append(FoundProblem(kind, text))
