"""Messages to prompt text, by the chat template of the checkpoint.

Knows what OpenAI's clients send and what Hugging Face's templates expect, and nothing of tokens' ids.
The ids of the result are those of ``transformers``' ``apply_chat_template``, but for control tokens that
a user spells, which become ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError, UndefinedError

from twinpool.core.errors import InvalidRequest, ModelError
from twinpool.text.control import ControlTokens, Marks, Plain, choose_marks, mark_value, split_at_marks
from twinpool.text.rendered import RenderedChat, Segment
from twinpool.text.sandbox import RenderLimits, TemplateSandbox
from twinpool.text.tokenizer import Tokenizer, read_json

_DEFAULT, _FOR_TOOLS = "default", "tool_use"
_FINAL_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "a1b2c3"

Message = dict[str, Plain]


class ChatTemplate:
    """How one model wants a chat written.

    Args:
        sources: Template texts by name; ``default`` is used, ``tool_use`` when there are tools.
        tokenizer: Gives the special tokens.
        now: What a template that prints the date prints.

    Raises:
        ModelError: A template is damaged or reaches for what it must not have.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokenizer: Tokenizer,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._variables = dict(tokenizer.special_tokens)
        self._templates: dict[str, _Template] = {}
        for name, source in sources.items():
            try:
                sandbox = TemplateSandbox(source, limits=RenderLimits(), now=now)
            except TemplateError as error:
                raise ModelError("--model", f"the chat template cannot be used: {error}") from error
            self._templates[name] = _Template(sandbox, source, tokenizer.added_tokens)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read the template of the checkpoint in ``folder``; there may be none.

        Raises:
            ModelError: The template is damaged or reaches for what it must not have.
        """
        sources: dict[str, str] = {}
        found = read_json(folder / "tokenizer_config.json").get("chat_template")
        if isinstance(found, str):
            sources[_DEFAULT] = found
        elif isinstance(found, list):
            sources.update({str(entry["name"]): str(entry["template"]) for entry in found})
        path = folder / "chat_template.jinja"
        if path.is_file():
            sources[_DEFAULT] = path.read_text(encoding="utf-8")
        return cls(sources, tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Return the prompt that ``messages`` make.

        Args:
            messages: Each with a ``role`` and a ``content``: a string, a list of text parts, or null.
            add_generation_prompt: End with the beginning of an answer.
            tools: What the model may call, as OpenAI's API has them.
            continue_final_message: End inside the last message, for the model to go on with it.
            variables: Further values for the template, as ``enable_thinking``.

        Raises:
            InvalidRequest: There is no template, a part is no text, or the template refuses the messages.
        """
        name = _FOR_TOOLS if tools and _FOR_TOOLS in self._templates else _DEFAULT
        template = self._templates.get(name)
        if template is None:
            raise InvalidRequest("messages", "this model has no chat template")
        if not messages:
            raise InvalidRequest("messages", "are empty")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("add_generation_prompt", "cannot go with continue_final_message")
        chat = [_message(message, takes_parts=template.takes_parts(self._variables)) for message in messages]
        given: dict[str, Plain] = {"tools": [_plain(tool) for tool in tools] if tools else None}
        given.update({key: _plain(value) for key, value in (variables or {}).items()})
        fixed = {"add_generation_prompt": add_generation_prompt, "documents": None, **self._variables}
        try:
            return template.render(chat, given, fixed, continues=continue_final_message)
        except UndefinedError as error:
            if all(message.get("content") is not None for message in chat):
                raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error
        except TemplateError as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error
        # A template that wants content where there is none, as after a tool call, gets an empty one.
        chat = [{**message, "content": message.get("content", "")} for message in chat]
        try:
            return template.render(chat, given, fixed, continues=continue_final_message)
        except TemplateError as error:
            raise InvalidRequest("messages", f"the chat template refuses them: {error}") from error


class _Template:
    """One template with the control tokens that it and the tokenizer know."""

    def __init__(self, sandbox: TemplateSandbox, source: str, added_tokens: Mapping[str, bool]) -> None:
        self._sandbox = sandbox
        self._source = source
        special = {token for token, is_special in added_tokens.items() if is_special}
        written = {token for token in added_tokens if token in sandbox.literals and not token.isspace()}
        self._tokens = ControlTokens(special | written)
        # An assistant's earlier turn may hold markup, as <think>, that the template itself takes apart.
        self._assistant_tokens = ControlTokens(special)
        self._takes_parts: bool | None = None

    def takes_parts(self, variables: Mapping[str, Plain]) -> bool:
        """Return whether the template itself reads content that is a list of parts."""
        if self._takes_parts is None:
            parts: Plain = [{"type": "text", "text": _PROBE}]
            try:
                messages: Plain = [{"role": "user", "content": parts}]
                text = self._sandbox.render({**variables, "messages": messages, "tools": None})
            except TemplateError:
                text = ""
            self._takes_parts = _PROBE in text and "'text'" not in text and '"text"' not in text
        return self._takes_parts

    def render(
        self, chat: list[Message], given: Mapping[str, Plain], fixed: Mapping[str, Plain], *, continues: bool
    ) -> RenderedChat:
        marks = choose_marks([cast(Plain, chat), dict(given)], self._source)
        marked: list[Plain] = [self._marked(message, marks) for message in chat]
        if continues:
            marked[-1] = _tagged(cast(Message, marked[-1]))
        variables = {
            **fixed,
            **cast(Message, mark_value(dict(given), self._tokens, marks)),
            "messages": marked,
        }
        text = self._sandbox.render(variables)
        if continues:
            text = _cut_at_tag(text)
        # JSON that a template writes in ASCII has the marks as escapes.
        for mark in marks:
            text = text.replace(json.dumps(mark)[1:-1], mark)
        if not any(mark in text for mark in marks):
            return RenderedChat((Segment(text, False),))
        return split_at_marks(text, self._tokens, marks)

    def _marked(self, message: Message, marks: Marks) -> Plain:
        tokens = self._assistant_tokens if message["role"] == "assistant" else self._tokens
        return mark_value(message, tokens, marks)


def _message(message: Mapping[str, Any], *, takes_parts: bool) -> Message:
    """Return a message as templates expect it: plain values, no nulls, arguments of calls as objects."""
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise InvalidRequest("messages", "have one without a role")
    content = plain.get("content")
    if isinstance(content, list):
        texts = [_part_text(part) for part in content]
        if not takes_parts:
            plain["content"] = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest("messages", "have content that is neither text nor a list of parts")
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    calls = plain.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _arguments(cast(str, function["arguments"]))
    return plain


def _part_text(part: Plain) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise InvalidRequest("messages", f"have a part of type {kind}, this model reads only text")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest("messages", "have a text part without text")
    return text


def _arguments(text: str) -> Plain:
    """Return the object that OpenAI's API sends as a string; what is no JSON object stays as it is."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _plain(parsed) if isinstance(parsed, dict) else text


def _plain(value: Any) -> Plain:
    """Return a copy made of nothing but JSON's own types, so that a template meets no method of ours."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise InvalidRequest("messages", f"hold a {type(value).__name__}")


def _tagged(message: Message) -> Message:
    """Mark the end of the last message's text.

    Source: ``render_jinja_template`` in huggingface/transformers, utils/chat_template_utils.py.
    """
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _FINAL_TAG}
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        last = {**content[-1], "text": f"{content[-1].get('text')}{_FINAL_TAG}"}
        return {**message, "content": [*content[:-1], last]}
    raise InvalidRequest("messages", "end with one that has no text to continue")


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_FINAL_TAG.strip())
    if at < 0:
        raise InvalidRequest("messages", "end with one that the chat template does not print")
    if text.startswith(_FINAL_TAG, at):
        return text[:at]
    return text[:at].rstrip()
