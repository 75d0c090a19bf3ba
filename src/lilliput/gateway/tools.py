"""Tools: what a model is told of them, and how its calls are found in its answer.

Chat templates tell models of tools in many ways, and models call them in as many. This understands the most common one,
JSON between tags; a model with another is refused its tools, rather than its calls shown as text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lilliput.gateway.problems import Problem, unsupported
from lilliput.gateway.requests import ChatRequest, NamedTool, Tool
from lilliput.gateway.served_model import ServedModel

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """One call of a tool; `arguments` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class CallReader:
    """Splits an answer, as it comes, into text and calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = set(names)
        self._text = self._blanks = ""
        self._inside = self._called = False

    def take(self, text: str) -> tuple[str, list[Call]]:
        """Some more of the answer came. Text that can be shown now, and calls that are complete."""
        self._text += text
        shown, calls = "", []
        while True:
            tag = CLOSE if self._inside else OPEN
            before, found, after = self._text.partition(tag)
            if not found:
                break
            self._text = after
            if self._inside:
                call = self._call(before)
                if call is not None:
                    calls.append(call)
                else:
                    shown += OPEN + before + CLOSE
            else:
                shown += before
            self._inside = not self._inside
        if not self._inside:
            certain = len(self._text) - _overlap(self._text, OPEN)
            shown += self._text[:certain]
            self._text = self._text[certain:]
        return self._visible(shown, calls), calls

    def rest(self) -> tuple[str, list[Call]]:
        """What was held back, when nothing more comes."""
        text, self._text = self._text, ""
        call = self._call(text) if self._inside else None
        if call is not None:
            return "", [call]
        return self._visible(OPEN + text if self._inside else text, []), []

    def _visible(self, text: str, calls: list[Call]) -> str:
        """Blanks between calls, and after the last, are no part of the answer."""
        text, self._blanks = self._blanks + text, ""
        self._called = self._called or bool(calls)
        if self._called and not text.strip():
            self._blanks = "" if calls else text
            return ""
        return text

    def _call(self, text: str) -> Call | None:
        try:
            said = json.loads(text)
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if name not in self._names or not isinstance(arguments, dict):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str, tag: str) -> int:
    """How many of the last characters of `text` may be the beginning of `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def wanted(request: ChatRequest, model: ServedModel) -> list[Tool]:
    """The tools that the answer may call. Raises `Problem` if this model cannot."""
    if not request.tools or request.tool_choice == "none":
        return []
    if "tools" not in model.template:
        raise unsupported(f"The chat template of {model.name} takes no tools.", "tools")
    if OPEN not in model.template:
        raise unsupported(f"{model.name} calls tools in a way that this server cannot read.", "tools")
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported("Tools and a response_format cannot go together here.", "response_format")
    return request.tools


def grammar(request: ChatRequest, tools: Sequence[Tool]) -> str | None:
    """The grammar of an answer that has to be a call, in llguidance's Lark; None if it need not be one."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise Problem(f"There is no tool {choice.function.name!r} among the tools.", param="tool_choice")
    elif choice != "required":
        return None
    several = request.parallel_tool_calls and choice == "required"
    try:
        schema = json.dumps({"anyOf": [_schema(tool) for tool in tools], "x-guidance": {"whitespace_flexible": False}})
    except (ValueError, RecursionError):
        raise Problem("The parameters of a tool are nested too deeply.", param="tools") from None
    return "\n".join(
        [
            'start: call ("\\n" call)*' if several else "start: call",
            f'call: "{OPEN}\\n" body "\\n{CLOSE}"',
            f"body: %json {schema}",
        ]
    )


def _schema(tool: Tool) -> dict[str, Any]:
    arguments = tool.function.parameters or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
