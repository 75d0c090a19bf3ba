"""transformers in one process, as it comes: what a swarm is measured against.

It runs in a process of its own, so that neither side's settings touch the other. Commands arrive as lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any


class Reference:
    """A process that measures when told to."""

    def __init__(self, folder: str, dtype: str) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lilliput.cli.bench.reference", folder, dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def measure(self, name: str, **options: Any) -> float:
        """Seconds that it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, options]) + "\n")
        self._process.stdin.flush()
        return float(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class _Model:
    def __init__(self, folder: str, dtype: str) -> None:
        import torch
        import transformers

        self._torch = torch
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval().requires_grad_(False)

    def generate(self, rows: int, prompt: int, new: int, seed: int) -> None:
        torch, model = self._torch, self._model
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(10, model.config.vocab_size - 10, (rows, prompt), generator=generator)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    def blocks(self, rows: int, tokens: int, backward: bool) -> None:
        """All blocks, without embedding and head."""
        torch, base = self._torch, self._model.base_model
        hidden = torch.randn(rows, tokens, base.config.hidden_size, dtype=self._model.dtype) * 0.1
        with torch.set_grad_enabled(backward):
            hidden.requires_grad_(backward)
            out = base(inputs_embeds=hidden, use_cache=False).last_hidden_state
            if backward:
                out.backward(torch.ones_like(out))


def main() -> None:
    model = _Model(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        name, options = json.loads(line)
        begun = time.perf_counter()
        getattr(model, name)(**options)
        print(json.dumps(time.perf_counter() - begun), flush=True)


if __name__ == "__main__":
    main()
