"""Logs of OpenAI-style requests: JSONL of `{session_id, messages, ...}`, one line a request.

The prompt is `messages`. The reply is `response`, `output` or `completion` (a text, a message, or the whole object that
the server returned); else the last message, if it is the assistant's, which then is no part of the prompt; else the
assistant's message that follows this prompt in the session's next line. A reply that is nowhere counts as `no_reply`.
Other fields that are read: `timestamp` or `created` (s, ms, us or ns since 1970, or ISO 8601) and `model`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dualpath.workload.formats.lines import Line, SessionKey, grouped
from dualpath.workload.formats.prefix import common
from dualpath.workload.formats.recorded import Notes, Recorded
from dualpath.workload.formats.text import Encode, Timestamp, seconds, text_session
from dualpath.workload.trace import TraceSession

Message = dict[str, Any]
Reply = str | Message | None


class _Request(msgspec.Struct):
    session_id: SessionKey
    messages: list[Message]
    response: Reply = None
    output: Reply = None
    completion: Reply = None
    timestamp: Timestamp | str | None = None
    created: Timestamp | str | None = None
    model: str | None = None


class _Prompt(msgspec.Struct):
    line: Line
    messages: list[Message]
    reply: str | None
    timestamp: float | None
    model: str


_DECODER = msgspec.json.Decoder(_Request)


def read_openai(paths: list[Path], notes: Notes, encode: Encode) -> Iterator[TraceSession]:
    for name, lines in grouped(paths, _DECODER, notes.skipped):
        prompts = [_prompt(line, row) for line, row in lines]
        times: list[float] | list[None] = [None] * len(prompts)
        stamps = [prompt.timestamp for prompt in prompts if prompt.timestamp is not None]
        if len(stamps) == len(prompts):
            prompts.sort(key=lambda prompt: prompt.timestamp or 0.0)
            times = seconds(sorted(stamps))
        yield from text_session(name, _requests(prompts, times, notes, encode), notes)


def _requests(prompts: list[_Prompt], times: list[float] | list[None], notes: Notes, encode: Encode) -> list[Recorded]:
    requests = []
    texts: list[str] = []
    tokens: list[list[int]] = []
    for number, (prompt, t) in enumerate(zip(prompts, times, strict=True)):
        new = [render(message) for message in prompt.messages]
        same = common(texts, new)
        tokens = tokens[:same] + [encode(text) for text in new[same:]]
        texts = new
        reply = prompt.reply
        if reply is None and number + 1 < len(prompts):
            reply = _reply_in(prompt.messages, prompts[number + 1].messages)
        if reply is None:
            notes.adjusted["no_reply"] += 1
        blocks = tuple(token for message in tokens for token in message)
        requests.append(
            Recorded(
                prompt=len(blocks),
                output=len(encode(reply or "")),
                blocks=blocks,
                t=t,
                kind=_kind(prompt.messages),
                model=prompt.model,
            )
        )
    return requests


def render(message: Message) -> str:
    """A message as text: its role, what it says and what it calls."""
    return f"{message.get('role', '')}\n{_says(message)}\n"


def _says(message: Message) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, dict):
            text = part.get("text")
            texts.append(text if isinstance(text, str) else msgspec.json.encode(part).decode())
        elif part is not None:
            texts.append(str(part))
    for calls in ("reasoning_content", "tool_calls", "function_call"):
        if value := message.get(calls):
            texts.append(value if isinstance(value, str) else msgspec.json.encode(value).decode())
    return "".join(texts)


def _prompt(line: Line, row: _Request) -> _Prompt:
    messages, reply = row.messages, None
    for given in (row.response, row.output, row.completion):
        if given is not None:
            reply = _reply(given)
            break
    else:
        if messages and messages[-1].get("role") == "assistant":
            messages, reply = messages[:-1], _says(messages[-1])
    stamp = row.timestamp if row.timestamp is not None else row.created
    return _Prompt(line, messages, reply, _timestamp(line, stamp), row.model or "")


def _reply(given: str | Message) -> str:
    """The text of a reply: as text, as message, or within the object that the server returned."""
    if isinstance(given, str):
        return given
    choices = given.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        choice = choices[0]
        return _says(choice["message"]) if isinstance(choice.get("message"), dict) else str(choice.get("text") or "")
    return _says(given["message"] if isinstance(given.get("message"), dict) else given)


def _reply_in(messages: list[Message], following: list[Message]) -> str | None:
    """What the assistant says in `following` right after `messages`."""
    if len(following) <= len(messages) or following[: len(messages)] != messages:
        return None
    return _says(following[len(messages)]) if following[len(messages)].get("role") == "assistant" else None


def _timestamp(line: Line, value: float | str | None) -> float | None:
    if not isinstance(value, str):
        return value
    try:
        moment = datetime.datetime.fromisoformat(value)
    except ValueError:
        raise line.error(f"timestamp is {value[:40]!r}: a number or an ISO 8601 time is needed") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()


def _kind(messages: list[Message]) -> str:
    role = messages[-1].get("role") if messages else ""
    return "tool" if role in ("tool", "function") else "human" if role == "user" else ""
