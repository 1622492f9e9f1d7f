"""Parsers and flags of the commands, flags of a tiny engine, readers and checks of a command's output."""

import json
import shlex
import subprocess
import sys

from nanovllm.cli import main


def words(line):
    """The arguments that a shell makes of a line."""
    return shlex.split(line)


def python(*arguments, **options):
    """Another process of this Python, run to its end; its output is text."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


ENGINE = words("--enforce-eager --block-size 16 --num-kv-blocks 65 --max-model-len 256")
SHORT = words("--max-tokens 6")


def command_parsers(arguments=()):
    """The parser of each command, by its name; that of the command in the first argument, if there is one."""
    (commands,) = (action for action in main._parser(arguments)._actions if action.dest == "command")
    return dict(commands.choices)


def own_flags():
    """Every flag of every command."""
    return {
        flag for parser in command_parsers().values() for action in parser._actions for flag in action.option_strings
    }


def records(out):
    return [json.loads(line) for line in out.splitlines()]


def assert_refused(result, *named):
    """Check a command's result: status 2, and an error without a traceback; named: parts of it, " & " between them."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert "Traceback" not in err
    assert "error:" in err
    for part in " & ".join(named).split(" & "):
        assert part in err
