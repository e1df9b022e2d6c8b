"""People who answer MLflow's review queues, through its client, as the Review page does."""

from collections.abc import Callable
from typing import Any

from rlhf_core.tracking.mlflow_client import import_mlflow, open_client
from rlhf_core.tracking.review_queues import ITEM_TAG


def queues(uri: str, experiment: str) -> dict[str, Any]:
    """Return the queues of an experiment by name."""
    client = open_client(uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return {}
    from mlflow.genai import review_queues

    return {one.name: one for one in review_queues.list_review_queues(experiment_id=found.experiment_id)}


def answer(
    uri: str,
    experiment: str,
    queue: str,
    choose: Callable[[str, str], str],
    *,
    at_most: int = 1000,
    who: str = "default",
    question: str = "preferred",
) -> int:
    """Answer pending items of a queue by `choose(item, text)`; "" declines. Return how many."""
    one = queues(uri, experiment)[queue]
    mlflow, client = import_mlflow(), open_client(uri)
    from mlflow.genai import review_queues

    pending = list(review_queues.list_review_queue_items(one.queue_id, status="pending", max_results=100))[:at_most]
    for item in pending:
        info = client.get_trace(item.item_id).info
        choice = choose(info.tags[ITEM_TAG], info.response_preview)
        if choice:
            source = mlflow.entities.AssessmentSource("HUMAN", who)
            mlflow.log_feedback(trace_id=item.item_id, name=question, value=choice, rationale="because", source=source)
        status = "complete" if choice else "declined"
        review_queues.set_review_queue_item_status(one.queue_id, item_id=item.item_id, status=status, completed_by=who)
    return len(pending)
