"""What cannot be served is refused for a reason, before anything large is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, REFUSED, Family
from transformers import AutoConfig

from lilliput.errors import UnsupportedModel
from lilliput.models.refusal import refusal
from lilliput.models.sources import resolve


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_work_are_refused(model_type: str, tmp_path: Path) -> None:
    try:
        config = AutoConfig.for_model(model_type)
    except ValueError:
        pytest.skip("this release of transformers does not know it")
    config.save_pretrained(tmp_path / "model")  # and no weights
    with pytest.raises(UnsupportedModel, match=REFUSED[model_type]):
        resolve(str(tmp_path / "model"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_that_work_are_not(family: Family) -> None:
    config = json.loads(AutoConfig.for_model(family.model_type, **family.config).to_json_string())
    assert refusal(config) is None


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 10},
        {"model_type": "unheard_of", "layer_types": ["full_attention", "telepathy"], "vocab_size": 10},
        {"model_type": "both", "vision_config": {}, "text_config": {"model_type": "jamba", "mamba_d_state": 16}},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_configuration_that_says_so(config: dict[str, Any]) -> None:
    assert refusal(config)
