"""`model:adapter` names a model with an adapter."""

from __future__ import annotations

from typing import Any

import openai
import pytest


def test_a_model_with_an_adapter_answers_otherwise(client: openai.OpenAI) -> None:
    plain, adapted = (model.id for model in client.models.list().data)
    assert adapted == f"{plain}:noise"
    assert client.models.retrieve("smollm2:noise").id == adapted

    def answer(model: str) -> Any:
        return client.completions.create(model=model, prompt="The capital of France is", max_tokens=8, temperature=0)

    answers = {model: answer(model) for model in (plain, adapted)}
    assert answers[adapted].model == adapted
    assert answers[plain].choices[0].text != answers[adapted].choices[0].text
    for missing in (f"{plain}:nothing", "another:noise", f"{plain}:"):
        with pytest.raises(openai.NotFoundError) as refused:
            answer(missing)
        assert refused.value.code == "model_not_found"
