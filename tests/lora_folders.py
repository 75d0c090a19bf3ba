"""Adapters as PEFT saves them, with random numbers in both halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def save_adapter(model: Path, folder: Path, *, seed: int = 0, size: float = 0.2, **config: Any) -> Path:
    """An adapter of the model in a folder, as PEFT saves it."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(**config))
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero as they are made
                parameter.copy_(torch.randn_like(parameter) * size)
    adapted.save_pretrained(str(folder))
    return folder


def with_adapter(model: Path, folder: Path, **options: Any) -> Any:
    """The whole model with an adapter, in one process."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **options)
    return PeftModel.from_pretrained(base, str(folder)).eval()
