"""What may be asked: the bodies of all POST routes, checked field by field.

One rule for fields that are not listed here:
- a field that steers the inside (KV transfers, client tensors, templates) is refused, whatever its value;
- a field that would change the answer, and is not supported, is refused unless it asks for the default;
- every other field (labels, billing, storage, hints) is ignored.
Null in a field means that the field is absent; so does an empty list, object or string where OpenAI takes it.
It knows nothing of tokens and of the model: ``prepare.py`` checks what depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from router.roles import RoleOrder
from twinpool.core.errors import InvalidRequest
from twinpool.core.ports import Role

MAX_CHOICES = 16
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 256
MAX_LOGIT_BIASES = 300
MAX_PROMPTS = 32
MAX_MESSAGES = 2048
MAX_TOOLS = 128
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 256
MAX_WORKERS = 1024
MAX_ROLE_TIMEOUT_S = 3600.0

TEMPLATE_OWN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
INTERNAL_PREFIXES = ("kv_", "bootstrap_", "do_remote_", "remote_", "disagg")
INTERNAL_FIELDS = frozenset(
    {
        "chat_template",
        "data_parallel_rank",
        "features",
        "input_embeds",
        "logits_processors",
        "lora_path",
        "mm_processor_kwargs",
        "prompt_embeds",
        "return_hidden_states",
        "vllm_xargs",
        "custom_logit_processor",
        "custom_params",
    }
)
# What changes the answer and is not supported, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "audio": ({},),
    "bad_words": ([],),
    "best_of": (1,),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": ("",),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ({}, ""),
    "guided_regex": ("",),
    "include_stop_str_in_output": (False,),
    "json_schema": ({}, ""),
    "length_penalty": (1,),
    "modalities": ([], ["text"]),
    "prediction": ({},),
    "regex": ("",),
    "response_format": ({}, {"type": "text"}),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("", "none", "auto"),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": ({},),
}
CHAT_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {"echo": (False,), "prompt": (), "stop_reason": ()}

_TOKEN_ID = re.compile(r"[0-9]{1,18}")


def _problem(text: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{problem}", {"problem": text})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(value: object) -> tuple[int, ...] | None:
    """Return the ids when ``value`` is a list of integers, else None."""
    if isinstance(value, list) and set(map(type, value)) <= {int}:
        return tuple(value)
    return None


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Read the four spellings of prompts: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _problem("must be a string, a list of strings, token ids, or a list of token-id lists")
    if not value:
        raise _problem("is empty")
    ids = _token_ids(value)
    if ids is not None:
        return (ids,)
    if len(value) > MAX_PROMPTS:
        raise _problem(f"has more than {MAX_PROMPTS} prompts")
    return tuple(_one_prompt(item) for item in value)


def _one_prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    ids = _token_ids(value)
    if ids is None:
        raise _problem("holds something that is neither text nor a list of token ids")
    if not ids:
        raise _problem("holds an empty list of token ids")
    return ids


def _stops(value: object) -> tuple[str, ...]:
    if value == "":
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _problem("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _problem(f"has more than {MAX_STOPS} strings")
    if not all(stops):
        raise _problem("holds an empty string, which stops nothing")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise _problem(f"holds a string of more than {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise _problem("must be an object from token ids to biases")
    if len(value) > MAX_LOGIT_BIASES:
        raise _problem(f"has more than {MAX_LOGIT_BIASES} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise _problem("has a key that is no token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100 <= bias <= 100:
            raise _problem("has a bias that is no number in [-100, 100]")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


def _some_token_ids(value: object) -> tuple[int, ...]:
    ids = _token_ids(value)
    if ids is None:
        raise _problem("must be a list of token ids")
    return ids


def _stop_token_ids(value: object) -> tuple[int, ...]:
    ids = _some_token_ids(value)
    if len(ids) > MAX_STOP_TOKENS:
        raise _problem(f"has more than {MAX_STOP_TOKENS} ids")
    return tuple(dict.fromkeys(ids))


def _top_k(value: object) -> int:
    if not _is_int(value) or not -1 <= value < 2**31:  # type: ignore[operator]
        raise _problem("must be a positive integer, or 0 or -1 for off")
    return max(0, value)  # type: ignore[call-overload,no-any-return]


def _arguments(value: object) -> str | dict[str, object]:
    if not isinstance(value, str | dict):
        raise _problem("must be JSON in a string, or an object")
    return value


def _content(value: object) -> str | list[dict[str, object]]:
    """Read text, or parts that are all text; ``refusal`` parts are text that an assistant wrote."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _problem("must be a string or a list of parts")
    parts: list[dict[str, object]] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise _problem("has a part that is no text; this server takes text only")
        text = part.get(kind)
        if not isinstance(text, str):
            raise _problem("has a text part without text")
        parts.append({"type": "text", "text": text})
    return parts


def _template_values(value: object) -> dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise _problem("must be an object")
    for name in value:
        if name in TEMPLATE_OWN or name.endswith("_token"):
            raise _problem("sets a variable that is the server's own")
    return dict(value)


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: object) -> object:
        if isinstance(value, dict):
            return {name: item for name, item in value.items() if item is not None}
        return value


_Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
_NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(_Body):
    """What a stream carries beside the text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Generation(_Body):
    """The fields that both generating routes share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_completion_tokens: _Count | None = None
    min_tokens: _Count = 0
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, PlainValidator(_top_k)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias)] = ()
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stops)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_stop_token_ids)] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: _NumLogprobs | None = None
    return_token_ids: bool = False
    user: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @model_validator(mode="after")
    def _fields_fit_each_other(self) -> _Generation:
        if self.stream and self.prompt_logprobs is not None:
            raise PydanticCustomError("prompt_logprobs", "cannot be streamed")
        return self


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], PlainValidator(_prompts)]
    max_tokens: _Count | None = None
    logprobs: _NumLogprobs | None = None
    echo: bool = False
    add_special_tokens: bool = True


class Function(_Body):
    """A function that an earlier turn called."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    arguments: Annotated[str | dict[str, object], PlainValidator(_arguments)] = ""


class ToolCall(_Body):
    """One call of a function in an assistant's turn."""

    id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    type: Literal["function"] = "function"
    function: Function


class Message(_Body):
    """One turn of a conversation; ``developer`` is read as ``system``."""

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda value: "system" if value == "developer" else value),
    ]
    content: Annotated[str | list[dict[str, object]] | None, PlainValidator(_content)] = None
    reasoning_content: str | None = None
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None

    @model_validator(mode="after")
    def _has_something_to_say(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "is missing")
        return self

    def for_template(self) -> dict[str, object]:
        """Return the fields a chat template may look at; those that are absent are left out."""
        return self.model_dump(exclude_none=True)


def _tools(value: object) -> tuple[dict[str, object], ...]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise _problem(f"must be a list of at most {MAX_TOOLS} tools")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _problem("holds something that is no function with a name")
    return tuple(value)


class ConversationBody(_Body):
    """The fields that make a prompt from a conversation."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[tuple[dict[str, object], ...], PlainValidator(_tools)] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, object], PlainValidator(_template_values)] = {}

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> ConversationBody:
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise PydanticCustomError("continue_final_message", "needs an assistant's message at the end")
        return self


class ChatBody(_Generation, ConversationBody):
    """POST /v1/chat/completions.

    Tools are shown to the model through the template.  No parser turns its answer into calls: it comes
    as plain text, so ``tool_choice`` may be "none" or "auto" and nothing that promises a call.
    """

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool = False
    top_logprobs: _NumLogprobs | None = None

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "needs logprobs: true")
        return self


class TokenizeTextBody(_Body):
    """POST /tokenize with a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ConversationBody):
    """POST /tokenize with messages."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(_Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[tuple[int, ...], PlainValidator(_some_token_ids)]
    skip_special_tokens: bool = False


class _AdminBody(_Body):
    """An order: a word that is not understood is refused, so that a slip changes nothing."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ScaleBody(_AdminBody):
    """POST /admin/scale; a role that is not named stays as it is."""

    prefill: Annotated[int, Field(ge=0, le=MAX_WORKERS)] | None = None
    decode: Annotated[int, Field(ge=0, le=MAX_WORKERS)] | None = None
    colocated: Annotated[int, Field(ge=0, le=MAX_WORKERS)] | None = None

    def wanted(self) -> dict[Role, int]:
        """Return the number of workers by role, for the roles that were named."""
        named = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.COLOCATED: self.colocated}
        return {role: count for role, count in named.items() if count is not None}


class ReplaceBody(_AdminBody):
    """POST /admin/replace."""

    worker: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class RoleBody(_AdminBody):
    """POST /admin/workers/{id}/role."""

    role: Annotated[Role, Field(strict=False)]
    timeout_s: Annotated[float, Field(gt=0.0, le=MAX_ROLE_TIMEOUT_S)] = 30.0
    clear_cache: bool = False
    force: bool = False

    def order(self, worker_id: str) -> RoleOrder:
        """Return what is wanted of a worker."""
        return RoleOrder(
            worker_id=worker_id,
            role=self.role,
            timeout_s=self.timeout_s,
            clear_cache=self.clear_cache,
            is_forced=self.force,
        )


BodyT = TypeVar("BodyT", bound=_Body)


def validate(kind: type[BodyT], raw: dict[str, object]) -> BodyT:
    """Check one parsed body.

    Raises:
        InvalidRequest: With the name of the first field at fault.
    """
    present = {name: value for name, value in raw.items() if value is not None}
    _refuse_what_is_not_ours(present, kind)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _first_problem(error.errors(include_url=False, include_input=False)[0]) from None


def _refuse_what_is_not_ours(raw: Mapping[str, object], kind: type[_Body]) -> None:
    for name in raw:
        if name in INTERNAL_FIELDS or name.startswith(INTERNAL_PREFIXES):
            raise InvalidRequest(name[:64], "cannot be set by a client")
    tables = (UNSUPPORTED, CHAT_UNSUPPORTED) if issubclass(kind, ChatBody) else (UNSUPPORTED,)
    for table in tables:
        for name, harmless in table.items():
            if name in raw and not any(_is_same(raw[name], value) for value in harmless):
                raise InvalidRequest(name, "is not supported")


def _is_same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _first_problem(problem: ErrorDetails) -> InvalidRequest:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"]).lstrip(
        "."
    )
    if problem["type"] in ("refused", "missing"):
        return InvalidRequest(path, "is missing" if problem["type"] == "missing" else problem["msg"])
    if problem["type"] in _Generation.model_fields | ChatBody.model_fields | Message.model_fields:
        return InvalidRequest(
            f"{path}.{problem['type']}".lstrip("."), problem["msg"]
        )  # found by a model check
    return InvalidRequest(path, problem["msg"][:1].lower() + problem["msg"][1:])
