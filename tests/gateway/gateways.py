"""How the tests reach an API's process."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import openai

KEYS = ("first-key", "second-key")
#: whose pages may ask
ORIGIN = "https://chat.example"
#: by name, with limits
LIMITED = {"one": ("sk-one", "requests=1"), "few": ("sk-few", "tokens-per-minute=20 requests-per-minute=600")}


@dataclass
class Gateway:
    """An API's process, and what it needs to be called."""

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, key: str = KEYS[0]) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
