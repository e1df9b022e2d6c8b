"""An executor of its own, as OpenRLHF's users write it: it asks twice and keeps the second answer alone."""

from copy import deepcopy

from openrlhf.utils.agent import AgentExecutorBase


class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):
        tokens = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        params = deepcopy(sampling_params)
        params.max_tokens = 9
        if label == "hot":
            params.temperature = 2.0
        await llm_engine.generate(tokens, deepcopy(params))
        output = (await llm_engine.generate(tokens, deepcopy(params))).outputs[0]
        kept = list(output.token_ids)
        if label == "forged":
            kept[0] += 1
        return {
            "prompt": prompt,
            "label": label,
            "observation_tokens": tokens + kept,
            "action_ranges": [(len(tokens), len(tokens) + len(kept))],
            "rollout_log_probs": [0.0] * len(tokens)
            + [output.logprobs[i][t].logprob for i, t in enumerate(output.token_ids)],
            "reward": {"unpaid": None, "won": 1.0, "lost": -1.0}.get(label, 0.25),
            "scores": {"won": 1.0, "lost": 0.0, "garbled": "good"}.get(label, 0.5),
            "extra_logs": {},
            "truncated": output.finish_reason == "length",
        }
