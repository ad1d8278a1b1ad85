"""Runs a chat template, which is a program that came with the weights, without trusting it.

Knows Jinja and its budgets: steps, characters and time.  Nothing of messages.  Every loop, call,
filter, output and string operation of a template passes through here, since a template without any
forbidden attribute can still fill the memory or never end.

Source: ``_cached_compile_jinja_template`` in huggingface/transformers, utils/chat_template_utils.py, for
what templates may use.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_MAX_INTEGER = 1_000_000  # as a width or a count
_MAX_BITS = 10_000  # of a product
_MAX_EXPONENT = 1000
_TAKES_ANY_INTEGER = ("default", "d")
_WIDE_FORMAT = re.compile(r"\d{6,}|\*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may use."""

    max_steps: int = 2_000_000  # loop turns, calls and filters together
    max_chars: int = 16_000_000  # of any one string, the result included
    timeout_s: float = 5.0


class TemplateSandbox:
    """One compiled template.

    Args:
        source: The template's text.
        limits: What one rendering may use; compiling it too.
        now: What ``strftime_now`` formats.

    Attributes:
        literals: Every string constant of the template, joined with NUL characters.

    Raises:
        jinja2.TemplateError: It is no template, or reaches for what it must not have.
    """

    def __init__(self, source: str, *, limits: RenderLimits, now: Callable[[], datetime]) -> None:
        self._limits = limits
        self._lock = threading.Lock()  # the environment holds one budget, so one rendering at a time
        self._environment = _Environment(_Budget(limits), now)
        try:
            self._template = self._environment.from_string(source)
            self.literals = _literals(self._environment.parse(source))
        except RecursionError as error:
            raise TemplateError("it is nested too deeply") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Return the text the template makes of ``variables``, which are plain JSON values.

        Raises:
            jinja2.TemplateError: The template refused, failed, or went over its limits.
        """
        with self._lock:
            budget = self._environment.budget = _Budget(self._limits)
            chunks: list[str] = []
            num_chars = 0
            try:
                for chunk in self._template.generate(variables):
                    num_chars += len(chunk)
                    budget.check_chars(num_chars)
                    chunks.append(chunk)
            except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
                raise TemplateError(f"{type(error).__name__}: {error}") from error
            except (RecursionError, MemoryError) as error:
                raise TemplateError("it needs too much memory") from error
            return "".join(chunks)


class _Budget:
    """What is left of one rendering's limits."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._steps_left = limits.max_steps
        self._chars_left = 4 * limits.max_chars  # a text may pass through several macros on its way out
        self._ends_s = time.monotonic() + limits.timeout_s

    def spend(self, steps: int, *, chars: int = 0) -> None:
        self._steps_left -= steps
        self._chars_left -= chars
        if self._steps_left < 0:
            raise SecurityError(f"it takes more than {self._limits.max_steps} steps")
        if self._chars_left < 0:
            raise SecurityError(f"it writes more than {4 * self._limits.max_chars} characters")
        if time.monotonic() > self._ends_s:
            raise SecurityError(f"it takes more than {self._limits.timeout_s:g} s")

    def check_chars(self, count: int) -> None:
        if count > self._limits.max_chars:
            raise SecurityError(f"it makes a text of more than {self._limits.max_chars} characters")


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with budgets, and with forbidden attributes refused instead of empty."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])

    def __init__(self, budget: _Budget, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _GenerationTag],
            finalize=self._charge_output,
        )
        self.budget = budget
        self.filters["tojson"] = to_json
        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: now().strftime(form),
            namespace=_Namespace,
            dict=_Dict(),
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = Parser(self, source, name, filename).parse()
        _refuse_private_names(tree)
        rewritten = _Rewriter(self).visit(tree)
        assert isinstance(rewritten, nodes.Template)
        return rewritten

    def counted(self, items: Iterable[Any], turn_chars: int) -> Iterable[Any]:
        """Charge the turns of a loop: all at once where their number is known, else one by one."""
        if isinstance(items, Sized):
            self.budget.spend(1 + len(items), chars=turn_chars * len(items))
            return items
        return self._counted_one_by_one(items, turn_chars)

    def joined(self, *parts: object) -> str:
        """Do what ``~`` does."""
        texts = [str(part) for part in parts]
        self.budget.check_chars(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        self.budget.spend(1)
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            self._check_text_method(owner, function.__name__, (*args, *kwargs.values()))
        return self._measured(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give ``str.format`` only for formats that name no excessive width."""
        wrapped: Callable[..., str] | None = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do what an operator does, if its result is of a reasonable size."""
        self.budget.spend(1)
        if operator == "**":
            _check_integers((left, right), limit=_MAX_EXPONENT)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            self.budget.check_chars(len(left) + len(right))
        elif operator == "*":
            self._check_product(left, right)
        return super().call_binop(context, operator, left, right)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """Refuse; Jinja's own would print as nothing."""
        raise SecurityError(f"it reaches for {attribute} of a {type(obj).__name__}")

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps the marks by which Jinja passes its context
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.budget.spend(1)
            texts = [arg for arg in args if isinstance(arg, str)]
            if name not in _TAKES_ANY_INTEGER:
                _check_integers((*args[1:], *kwargs.values()), limit=_MAX_INTEGER)
            if name == "format" and texts:
                _check_format(texts[0])
            elif name == "replace" and texts:
                self._check_text_method(texts[0], name, texts[1:])
            return self._measured(function(*args, **kwargs))

        return guarded

    def _check_text_method(self, owner: str, method: str, args: Sequence[Any]) -> None:
        _check_integers(args, limit=_MAX_INTEGER)
        texts = [arg for arg in args if isinstance(arg, str)]
        if method == "replace" and len(texts) > 1:
            self.budget.check_chars(len(owner) + owner.count(texts[0]) * len(texts[1]))
        elif method == "join" and args and isinstance(args[0], list | tuple):
            self.budget.check_chars(sum(len(owner) + len(str(item)) for item in args[0]))

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if left.bit_length() + right.bit_length() > _MAX_BITS:
                raise SecurityError("it makes an excessive number")
            return
        for items, times in ((left, right), (right, left)):
            if isinstance(items, Sized) and isinstance(times, int):
                self.budget.check_chars(len(items) * max(times, 0))

    def _measured(self, result: Any) -> Any:
        if isinstance(result, Sized):
            self.budget.check_chars(len(result))
        return result

    def _charge_output(self, value: Any) -> Any:
        self.budget.spend(0, chars=len(value) if isinstance(value, str) else 0)
        return value

    def _counted_one_by_one(self, items: Iterable[Any], turn_chars: int) -> Iterator[Any]:
        for item in items:
            self.budget.spend(1, chars=turn_chars)
            yield item


class _Rewriter(NodeTransformer):
    """Sends loops and concatenations through the environment, where they are charged."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        turn_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        args: list[nodes.Expr] = [cast(nodes.Expr, node.iter), nodes.Const(turn_chars)]
        node.iter = self._call("counted", args, node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node)

    def _call(self, method: str, args: list[nodes.Expr], place: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)
        call.set_environment(self._environment)
        call.set_lineno(place.lineno, override=False)
        return call


class _GenerationTag(Extension):
    """``{% generation %}`` marks what a model is trained on; for serving it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without private names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"it stores {name} in a namespace")
        super().__setitem__(name, value)


class _Dict:
    """Makes dicts; the class itself is not handed out."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as chat templates expect it, without Jinja's escaping of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _refuse_private_names(tree: nodes.Template) -> None:
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Filter)):
        names: list[object] = []
        if isinstance(node, nodes.Getattr):
            names = [node.attr]
        elif isinstance(node, nodes.Getitem):
            names = [getattr(node.arg, "value", None)]
        elif isinstance(node, nodes.Filter) and node.name == "attr":
            names = [getattr(arg, "value", None) for arg in node.args]
        for name in names:
            if isinstance(name, str) and name.startswith("__"):
                raise SecurityError(f"it reaches for {name}")


def _literals(tree: nodes.Template) -> str:
    texts = [node.data for node in tree.find_all(nodes.TemplateData)]
    texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return "\0".join(texts)


def _check_integers(values: Iterable[Any], *, limit: int) -> None:
    if any(isinstance(value, int) and value > limit for value in values):
        raise SecurityError(f"it uses a number above {limit}")


def _check_format(form: str) -> None:
    if _WIDE_FORMAT.search(form):
        raise SecurityError("it formats to an excessive width")
