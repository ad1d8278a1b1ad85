"""Every command that is listed is there, and says what it does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module

import pytest

from twinpool.cli.app import main, parser


def commands(root: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Give the parsers that have no commands below them."""
    below = [action for action in root._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield root
    for action in below:
        for command in action.choices.values():
            yield from commands(command)


@pytest.mark.parametrize("command", list(commands(parser())), ids=lambda command: command.prog)
def test_a_command_says_what_it_does_and_is_there(command: argparse.ArgumentParser) -> None:
    module, _, function = command.get_default("run").partition(":")

    assert callable(getattr(import_module(f"twinpool.cli.{module}"), function))
    assert command.description is not None and command.description.endswith(".")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: COMMAND; twinpool --help tells more"),
        (["role", "decode-0"], "the following arguments are required: role; twinpool role --help tells more"),
    ],
)
def test_a_line_that_lacks_something_says_where_to_read_more(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)

    assert end.value.code == 2
    assert capsys.readouterr().err == f"twinpool: error: {message}\n"
