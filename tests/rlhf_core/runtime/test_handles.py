"""Trainers and samplers whose work is done by workers, here by objects that note what they are asked."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.runtime.handles import RaySampler, RayTrainer, _join
from rlhf_core.runtime.packed_completions import pack_completions, unpack_completions
from rlhf_core.runtime.placement import GpuSharing
from rlhf_core.runtime.sample_worker import SampleWorker
from rlhf_core.runtime.weight_sync import StoredWeights
from rlhf_core.sequences import Sequences, Subset
from rlhf_core.training.objectives.base import SftObjective, ValueObjective
from rlhf_core.types import ActionSpan, Completion, SamplingRequest, TokenSample

# Seven samples of unequal lengths: the ranks get four and three, and different numbers of tokens.
SAMPLES = [TokenSample(tuple(range(10, 16 + 3 * i)), (0, 0) + (1,) * (4 + 3 * i)) for i in range(7)]


DONE = Completion((7, 8), (-0.5, -1.0), "done", "stop", 0, 7)


def test_packed_completions_are_the_same_after_a_pickle_and_empty_ones_stay():
    made = [
        DONE,
        Completion((), (), "", "length", 1, 8, failure="no answer"),
        Completion((3, 4, 5), (-0.5, 0.0, -2.0), "episode", "stop", 2, 9, (ActionSpan(0, 1, 2, 0.5),), score=1.5),
        Completion((3, 4), (-0.5, 0.0), "experts", "stop", 2, 9, routed_experts=(7, 300, 2, 1, -1, -1)),
    ]
    assert unpack_completions(pickle.loads(pickle.dumps(pack_completions(made)))) == made
    assert unpack_completions(pack_completions([])) == []


def test_an_engine_gets_each_request_as_a_tuple_of_its_fields():
    class OneEngine:
        actors = (None,)

        def call_each(self, role: str, method: str, arguments: list[Any]) -> list[Any]:
            asked.extend(arguments)
            return [pack_completions([DONE] * len(arguments[0][0]))]

    asked: list[Any] = []
    requests = [SamplingRequest((1, 2), seed=7), SamplingRequest((3,), seed=8, max_tokens=5, routed_experts=True)]
    sampler = RaySampler(OneEngine(), transfer="", tensor_parallel=1)
    assert sampler.generate(requests, SamplingConfig()) == [DONE, DONE]
    assert asked[0][0] == (((1, 2), 7, 0, False), ((3,), 8, 5, True))


def test_weights_of_another_runtime_are_refused():
    sampler = RaySampler(None, transfer="", tensor_parallel=1)
    with pytest.raises(SamplingError, match=r"weights\.payload = 'dict': does not come from this runtime's trainer"):
        sampler.load_weights(Weights({}, ""), version=1)


class Engines:
    """Engines that finish the oldest of what they were given, the last one only when it is told to."""

    def __init__(self, count: int) -> None:
        self.actors = [None] * count
        self.given: list[list[int]] = [[] for _ in range(count)]
        self.is_slow = True

    def begin(self, role: str, method: str, rank: int, new: Any, sampling: SamplingConfig) -> int:
        assert (role, method) == ("policy", "advance")
        self.given[rank] += [number for number, _ in new]
        return rank

    def first(self, role: str, method: str, running: dict[int, int]) -> dict[int, Any]:
        assert all(rank == call for rank, call in running.items())
        ended = [rank for rank in running if not (self.is_slow and rank == len(self.actors) - 1)]
        return {rank: ([self.given[rank].pop(0)], pack_completions([DONE])) for rank in sorted(ended)}


def test_a_slow_engine_keeps_no_other_from_its_next_request():
    engines = Engines(3)
    sampler = RaySampler(engines, transfer="", tensor_parallel=1)

    def advanced(*new: int) -> list[int]:
        requests = [(number, SamplingRequest((1,), 7)) for number in new]
        return [number for number, _ in sampler.advance(requests, SamplingConfig())]

    assert (advanced(0, 1, 2, 3, 4, 5), engines.given) == ([0, 1], [[3], [4], [2, 5]])  # to the one with the fewest
    assert (advanced(6, 7), engines.given) == ([3, 4], [[6], [7], [2, 5]])
    last = range(8, 15)  # the slow engine is busy, and 12 has to wait for it
    assert (advanced(*last), engines.given) == ([6, 7], [[8, 10, 13], [9, 11, 14], [2, 5]])
    engines.is_slow = False
    assert (advanced(), engines.given) == ([8, 9, 2], [[10, 13], [11, 14], [5]])
    assert [advanced() for _ in range(4)] == [[10, 11, 5], [13, 14, 12], [], []]
    engines.is_slow = True
    advanced(11, 12, 13)
    sampler._drop()
    assert advanced() == []


def test_ranks_that_share_rows_get_the_same_samples_and_one_answers():
    class FourWorkers:
        actors = range(4)
        copies = 0

        def put(self, value: Any) -> Any:
            self.copies += 1
            return list(value)

        def call_each(self, role: str, method: str, arguments: list[Any]) -> list[Any]:
            assert arguments[0][1] is arguments[1][1] and arguments[2][1] is arguments[3][1]
            assert sorted(len(arguments[rank][1]) for rank in (0, 2)) == [3, 4]
            if method == "forward_backward":
                return [{"loss": float(len(each[1]))} for each in arguments]
            return [[float(len(sample.token_ids)) for sample in each[1]] for each in arguments]

    workers = FourWorkers()
    trainer = RayTrainer(workers, "policy", "policy-0", transfer="", ranks_per_share=2)
    assert trainer.forward_backward(SAMPLES, SftObjective(pack_to=None)) == {"loss": 7.0}
    assert workers.copies == 2
    assert trainer.step_scores(SAMPLES) == [float(len(sample.token_ids)) for sample in SAMPLES]


def test_numbers_per_token_come_back_in_the_order_of_the_samples_whatever_rank_measured_them():
    class TwoWorkers:
        actors = range(2)

        def call_each(self, role: str, method: str, arguments: list[Any], **keywords: Any) -> list[Any]:
            assert sorted(len(each[1]) for each in arguments) == [3, 4]
            return [each[1].token_ids.astype(np.float32) for each in arguments]

    trainer = RayTrainer(TwoWorkers(), "policy", "policy-0", transfer="")
    tokens = Sequences.of(SAMPLES)
    assert trainer.values(tokens).tolist() == tokens.token_ids.tolist()
    one = Sequences.of(SAMPLES[:1])
    with pytest.raises(
        ValueError, match=r"^\[5, 0\] values of the ranks for \[6, 0\] tokens; give each token its value$"
    ):
        _join([np.zeros(5, np.float32), np.zeros(0, np.float32)], [[0], []], one)


def test_ranks_get_the_numbers_of_sequences_that_are_in_the_object_store():
    class TwoWorkers:
        actors = range(2)

        def share(self, sequences: Sequences) -> Any:
            assert sequences.token_ids is tokens.token_ids
            return tuple(sequences.fields)

        def keep(self, arrays: list[Any]) -> list[Any]:
            kept.extend(arrays)
            return arrays

        def call_each(self, role: str, method: str, arguments: list[Any], **keywords: Any) -> list[Any]:
            given.extend(each[1] for each in arguments)
            if method == "values":
                return [np.repeat(one.rows, tokens.lengths[one.rows]).astype(np.float32) for one in given[-2:]]
            return [{"loss": float(counts["tokens"])} for *_, counts in arguments]

    given: list[Any] = []
    kept: list[Any] = []
    tokens = Sequences.of(SAMPLES)
    tokens = tokens.with_fields(returns=np.zeros(len(tokens.token_ids), np.float32), labels=tokens.token_ids * 0.5)
    trainer = RayTrainer(TwoWorkers(), "policy", "lease", transfer="")
    rows = np.array([6, 2, 4])  # of 24, 12 and 18 tokens, of which 22, 10 and 16 are trained on
    some = Subset(tokens.select_fields("returns"), rows)
    assert trainer.forward_backward(some, ValueObjective(clip=None)) == {"loss": 2 * 48.0}
    assert [(one.sequences, one.rows.tolist()) for one in given] == [(("returns",), [6]), (("returns",), [2, 4])]
    # Numbers of the rows, once for each of their tokens, stay in the object store in the order of the selection.
    values = trainer.values(Subset(tokens.select_fields(), rows))
    assert kept[0] is values and values.tolist() == [6] * 24 + [2] * 12 + [4] * 18
    assert given[-1].sequences == ()


def test_the_ranks_get_scalars_by_name_and_samples_may_be_named_too():
    asked: list[Any] = []

    class OneWorker:
        actors = (None,)

        def call_each(self, role: str, method: str, arguments: list[Any], **keywords: Any) -> list[Any]:
            asked.append((method, arguments, keywords))
            return [[0.0] * len(arguments[0][1])]

    trainer = RayTrainer(OneWorker(), "policy", "policy-0", transfer="")
    assert trainer.top_logprobs(SAMPLES[:2], k=3, temperature=0.5) == [0.0] * 2
    assert trainer.logprobs(samples=Sequences.of(SAMPLES[:2]), temperature=0.5) == [0.0] * 2
    assert [(method, keywords) for method, _, keywords in asked] == [
        ("top_logprobs", {"k": 3, "temperature": 0.5}),
        ("logprobs", {"temperature": 0.5}),
    ]
    with pytest.raises(TypeError, match="temperature"):
        trainer.logprobs(Sequences.of(SAMPLES))


REQUESTS = [SamplingRequest((1, 2), seed=7)]


class Workers:
    """A `WorkerGroup` of one that writes down who was asked what."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.actors = [None]
        self.broken = False
        self.fails = ""
        self._name = name
        self._log = log

    def call(self, role: str, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        told = {("wake", False): "wake for weights", ("sleep", False): "sleep without weights"}
        if method == "rest":
            told["rest", arguments[0]] = f"rest {arguments[0]}"
        self._log.append(f"{self._name} {told.get((method, *arguments[:1]), method)}")
        if method == self.fails:
            raise SamplingError("weights", "", "broken", "none")
        return [(1, "digest")]

    def call_each(self, role: str, method: str, arguments: list[Any], **keywords: Any) -> list[Any]:
        self._log.append(f"{self._name} {method}")
        return [np.zeros(6)] if method == "logprobs" else [pack_completions([])]

    def begin(self, role: str, method: str, rank: int, new: Any, sampling: SamplingConfig) -> Any:
        self._log.append(f"{self._name} {method}")
        return [number for number, _ in new], pack_completions([DONE] * len(new))

    def first(self, role: str, method: str, running: dict[int, Any]) -> dict[int, Any]:
        return running.copy()


def handles(
    log: list[str], *, sleeps: bool, trainers: bool = False, replaced: bool = True
) -> tuple[RayTrainer, RaySampler]:
    """Return a trainer and a sampler that share a GPU."""
    train: Any = Workers("trainer", log)
    sample: Any = Workers("engine", log)
    engines = (lambda: sample) if sleeps else None
    sharing = GpuSharing(engines, (lambda: train) if trainers else None, offload=True, replaced=replaced)
    trainer = RayTrainer(train, "policy", "policy-1", transfer="ipc", sharing=sharing)
    return trainer, RaySampler(sample, transfer="ipc", tensor_parallel=1, sharing=sharing)


def step(trainer: RayTrainer, sampler: RaySampler) -> None:
    sampler.generate(REQUESTS, SamplingConfig())
    trainer.logprobs(Sequences.of(SAMPLES[:1]), temperature=1.0)
    trainer.optim_step(learning_rate=0.1)
    sampler.load_weights(trainer.weights(), version=1)
    sampler.advance([(0, REQUESTS[0])], SamplingConfig())


def test_an_engine_sleeps_while_models_train_and_wakes_to_take_weights_and_to_sample():
    log: list[str] = []
    trainer, sampler = handles(log, sleeps=True)
    step(trainer, sampler)
    step(trainer, sampler)
    once = [
        *("engine generate", "engine sleep", "trainer logprobs", "trainer optim_step", "trainer stage_weights"),
        *("engine wake for weights", "trainer send_weights", "engine adopt", "engine wake", "engine advance"),
    ]
    assert log == once * 2


def test_a_trainer_sleeps_while_the_engine_samples_and_each_wakes_when_the_other_has_gone_to_sleep():
    log: list[str] = []
    trainer, sampler = handles(log, sleeps=True, trainers=True)
    step(trainer, sampler)
    step(trainer, sampler)
    train = ["trainer logprobs", "trainer optim_step", "trainer stage_weights"]
    take = ["trainer rest True", "engine wake for weights", "trainer send_weights", "engine adopt", "engine wake"]
    turn = ["engine generate", "engine sleep", "trainer wake", *train, *take, "engine advance"]
    assert log == ["trainer rest True", *turn, *turn]


@pytest.mark.parametrize("whole", [True, False])
def test_an_engine_drops_weights_only_before_it_gets_all_of_them(whole):
    """Adapters alone are no weights: the engine keeps those that they change."""
    log: list[str] = []
    trainer, sampler = handles(log, sleeps=True, replaced=whole)
    for expects in (True, False):
        if expects:
            sampler.expect_weights()
        trainer.optim_step(learning_rate=0.1)
        sampler.load_weights(Weights(StoredWeights(()), "digest"), version=1)
    loads = ["trainer optim_step", "engine wake for weights", "engine load_weights", "engine wake"]
    slept = "engine sleep without weights" if whole else "engine sleep"
    assert log == [slept, *loads, "engine sleep", *loads]


def test_after_a_failed_load_the_engine_is_awake():
    log: list[str] = []
    trainer, sampler = handles(log, sleeps=True)
    sampler.expect_weights()
    trainer.optim_step(learning_rate=0.1)
    sampler._workers.fails = "load_weights"
    with pytest.raises(SamplingError, match="broken"):
        sampler.load_weights(Weights(StoredWeights(()), "digest"), version=1)
    sampler.generate(REQUESTS, SamplingConfig())
    assert log[-3:] == ["engine load_weights", "engine wake", "engine generate"]


def test_a_trainer_sleeps_beside_an_engine_that_does_not():
    log: list[str] = []
    step(*handles(log, sleeps=False, trainers=True))
    assert log[:4] == ["trainer rest True", "engine generate", "trainer wake", "trainer logprobs"]
    assert not {"engine sleep", "engine wake"} & set(log)


def test_a_trainer_that_only_hands_unused_memory_over_is_not_woken():
    log: list[str] = []
    train: Any = Workers("trainer", log)
    engines: Any = Workers("engine", log)
    sharing = GpuSharing(lambda: engines, lambda: train)
    for _ in range(2):
        for turn in (sharing.sampling, sharing.sampling, sharing.training):
            with turn():
                pass
    assert log == ["trainer rest False", "engine sleep", "trainer rest False", "engine wake", "engine sleep"]


def test_workers_that_replaced_sleeping_ones_are_awake_and_are_put_to_sleep_in_their_turn():
    log: list[str] = []
    trainers: list[Any] = [Workers("trainer", log)]
    engines: list[Any] = [Workers("engine", log)]
    sharing = GpuSharing(lambda: engines[-1], lambda: trainers[-1], offload=True)
    with sharing.sampling():
        pass
    trainers.append(Workers("new trainer", log))
    with sharing.training():
        pass
    engines.append(Workers("new engine", log))
    with sharing.training():
        pass
    assert log == ["trainer rest True", "engine sleep", "new engine sleep"]


def test_engines_that_are_gone_or_not_there_yet_are_not_put_to_sleep():
    log: list[str] = []
    gone: Any = Workers("engine", log)
    gone.broken = True
    for engines in (None, gone):
        with GpuSharing(lambda engines=engines: engines).training():
            pass
    assert log == []
    SampleWorker.sleep(SampleWorker(None, 1))  # a worker that has opened nothing


def test_training_waits_until_the_sampling_is_over():
    order: list[str] = []
    log: list[str] = []
    workers: Any = Workers("engine", log)
    sharing = GpuSharing(lambda: workers)
    sampling = threading.Event()

    def train() -> None:
        sampling.wait(10)
        with sharing.training():
            order.append("trained")

    thread = threading.Thread(target=train)
    thread.start()
    with sharing.sampling():
        sampling.set()
        thread.join(0.2)
        order.append("sampled")
    thread.join(10)
    assert order == ["sampled", "trained"]
