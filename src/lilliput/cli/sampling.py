"""How the next token is chosen: the options of the commands that generate text."""

from __future__ import annotations

from typing import Annotated, Any

import typer

_MODELS_OWN = "the model's own"

MaxNewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="An answer's length at most, in tokens.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="T", help="0 takes the likeliest token, higher is wilder.", show_default=f"{_MODELS_OWN}, or 0"
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, metavar="P", help="Choose among the likeliest P of all.", show_default=_MODELS_OWN),
]
TopK = Annotated[
    int | None, typer.Option(min=1, metavar="K", help="Choose among the K likeliest.", show_default=_MODELS_OWN)
]
#: as large as torch takes them
Seed = Annotated[
    int | None,
    typer.Option(
        min=-(2**63), max=2**64 - 1, metavar="N", help="Makes choices repeatable.", show_default="another each time"
    ),
]


def options(
    temperature: float | None = None, top_p: float | None = None, top_k: int | None = None, num_beams: int | None = None
) -> dict[str, Any]:
    """Options of `generate()`. What is not given is as the model's makers have it; where they say nothing, greedy.

    Temperature 0 is greedy, whatever else is given; to give any other is to sample.
    """
    given = {"temperature": temperature or None, "top_p": top_p, "top_k": top_k, "num_beams": num_beams}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if temperature == 0:
        return {name: value for name, value in chosen.items() if name == "num_beams"} | {"do_sample": False}
    if temperature or top_p is not None or top_k is not None:
        chosen["do_sample"] = True
    return chosen
