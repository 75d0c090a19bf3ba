"""Writes docs/models.md from the table of families and the tests that prove them: `make models`."""

from __future__ import annotations

import re
from pathlib import Path

import transformers
from families import FAMILIES, REFUSED, Family

from lilliput.models.families import ADAPTED
from lilliput.models.quantized_checkpoint import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_HEAD = """\
# Models

Written by `make models` from the table in `tests/models/families.py`, after `tests/models/test_families.py` has passed
with transformers {release}. Change those, not this page.

A model is served if its family is in the table. Other families are tried the same way when they are loaded: most work,
since a span is the family's own class with holes. What is in the table was compared with transformers' own model, in
float32, on a small random configuration in three spans, one after the other:

- whole rows without a cache,
- a prefix in one go (cut into slices as the scheduler does), then token by token,
- packed with sessions of other lengths,
- rolled back and on with other tokens,
- rows that continue others, some of them twice,
- `generate()`: greedy, with beams, and with a batch of unequal prompts.

The largest difference allowed is {tolerance} of the largest logit. Sliding windows were shorter than the text. BLOOM
was also compared over real processes and connections. Besides the newest release, 4.56 and 5.12 were tried.

"""

_QUANTIZED = """

## Weights

In 32 or 16 bits as safetensors, in a `.gguf` file (llama, qwen2, qwen3), or quantized, as config.json says it in
`quantization_config`: {methods} (`tests/models/test_quantized_checkpoint.py`). They are read as the numbers
that their codes stand for; `--quantize` keeps these in few bits again, and int4 those that were of 4 bits as they are.
"""


def page(release: str, tolerance: str = "1e-4") -> str:
    """The page, for a release of transformers."""
    table = [("family", "`model_type`", "what is its own", "code of its own here", "works since transformers")]
    table += [_row(family) for family in FAMILIES]
    lines = [f"| {' | '.join(row)} |" for row in table]
    lines.insert(1, "| --- | --- | --- | --- | --- |")
    reasons = "\n".join(f"| `{name}` | {reason} |" for name, reason in REFUSED.items())
    return (
        _HEAD.format(release=release, tolerance=tolerance)
        + "\n".join(lines)
        + _QUANTIZED.format(methods=", ".join(f"`{name}`" for name in METHODS))
        + "\n## What is refused\n\n"
        + "Before the weights are fetched, with the reason (`lilliput/models/refusal.py`). Tried:\n\n"
        + "| `model_type` | what stands in the way |\n| --- | --- |\n"
        + reasons
        + "\n"
    )


def release_of(text: str) -> str:
    """The release of transformers that a page names."""
    found = re.search(r"with transformers (\S+)\. Change", text)
    return found[1] if found else ""


def _row(family: Family) -> tuple[str, ...]:
    own = f"`families/{family.model_type}.py`" if family.model_type in ADAPTED else "none"
    return family.name, f"`{family.model_type}`", family.kind, own, family.since


if __name__ == "__main__":
    PAGE.write_text(page(transformers.__version__), encoding="utf-8")
