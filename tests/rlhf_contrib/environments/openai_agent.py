"""An agent as people write them for OpenAI's server: it knows nothing of training.

It asks twice and says what it earned: the share of digits in what was said.
"""

import json
import os
import sys

from openai import OpenAI

task = json.loads(sys.stdin.readline())
client = OpenAI()
model = os.environ["OPENAI_MODEL"]
messages = task["messages"]
said = ""
for _ in range(2):
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0.7, max_tokens=12)
    message = answer.choices[0].message
    said += message.content or ""
    if answer.choices[0].finish_reason == "length":
        break
    messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "Go on."}]
print("what was said:", said)  # noqa: T201
print(json.dumps({"reward": sum(letter.isdigit() for letter in said) / max(len(said), 1), "letters": len(said)}))  # noqa: T201
