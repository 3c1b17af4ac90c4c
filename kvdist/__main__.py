"""The command ``kvdist``, which ``python -m kvdist`` is too: its subcommands, or the scheduler or a server.

A subcommand is a row of `GROUPS`. Without a subcommand, the process is the scheduler or the server that the environment
describes (`kvdist.serve`). If the environment describes no cluster, the process prints an overview of the subcommands.

Exit codes: those of the subcommand or of `kvdist.serve`. After the overview it is 2, so that a server whose environment
was forgotten does not look like a server that ended well.

This module imports little: a subcommand, or `kvdist.serve`, is imported when it is known to be needed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from kvdist.config.command_line import USAGE_ERROR, Parser, end_with
from kvdist.config.environment import describes_cluster
from kvdist.config.processes import module_words
from kvdist.config.suggestions import did_you_mean
from kvdist.errors import ConfigError, KvdistError
from kvdist.removed import AVERAGES_ELSEWHERE
from kvdist.version import __version__


class Subcommand(NamedTuple):
    """A subcommand.

    Attributes:
        about: its purpose, without capital and full stop, short enough for a line of 80 characters in the overview.
        place: a module of the launcher, which replaces this process (`os.execv`), as kvdist imports nothing of the
            launcher; or ``module:function``. The function adds arguments to a parser, and the function that answers as
            default of `command`: it takes the values of the arguments and returns a text to print and the exit code.
    """

    about: str
    place: str


GROUPS: dict[str, dict[str, Subcommand]] = {
    "start a job": {
        "launch": Subcommand("start a job, here or on several machines (kvdist-launch)", "kvdist_launch"),
        "run": Subcommand("the same without servers, with horovodrun's options (kvdist-run)", "kvdist_launch.run_cli"),
    },
    "before a job": {
        "doctor": Subcommand("check this machine, or hosts and the network between them", "kvdist_launch.doctor"),
        "estimate": Subcommand(
            "predict how fast each training mode is on unequal machines", "kvdist.estimate:add_arguments"
        ),
    },
    "while a job runs": {
        "status": Subcommand("list the jobs on this machine, and their processes", "kvdist.status:add_arguments"),
    },
    "after a failure": {
        "why": Subcommand(
            "name the process that failed or is awaited, from a job's dumps", "kvdist.diagnostics.why:add_arguments"
        ),
        "ledger": Subcommand(
            "say whether servers counted, refused or dropped a gradient", "kvdist.diagnostics.ledger:add_arguments"
        ),
    },
    "checkpoints": {
        "checkpoints": Subcommand("list the checkpoints in a folder", "kvdist.checkpoint.export:add_list_arguments"),
        "export": Subcommand(
            "write the weights of a checkpoint into one safetensors file", "kvdist.checkpoint.export:add_arguments"
        ),
    },
    "settings": {
        "config": Subcommand(
            "show every setting, its value here, and what has set it", "kvdist.config.describe:add_arguments"
        ),
    },
}
"""Every subcommand, in the groups of the overview."""

SUBCOMMANDS = {name: subcommand for group in GROUPS.values() for name, subcommand in group.items()}

SUMMARY = "a parameter server for PyTorch with MXNet's KVStore interface"

USAGE = "kvdist COMMAND [ARGUMENT...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, or the process that the environment describes. Returns the exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in SUBCOMMANDS:
        return _run(words[0], words[1:])
    if words and not words[0].startswith("-"):
        advice = did_you_mean(words[0], list(SUBCOMMANDS)) or "kvdist --help lists all"
        return end_with(f"error: unknown command {words[0]}; {advice}", USAGE_ERROR)
    if not words and not describes_cluster():
        _show(f"{overview()}\n\n{HINTS}")
        return USAGE_ERROR
    options = _parser().parse_args(words)
    from kvdist.serve import serve  # a second's worth of imports

    return serve(options)


def _run(name: str, words: Sequence[str]) -> int:
    """Run a subcommand."""
    about, place = SUBCOMMANDS[name]
    module, _, function = place.partition(":")
    if not function:
        os.execv(sys.executable, [sys.executable, *module_words(module), *words])
    parser = Parser(prog=f"kvdist {name}", description=f"{about[0].upper()}{about[1:]}.", instead=REMOVED.get(name))
    getattr(import_module(module), function)(parser)
    options = parser.parse_args(words)
    try:
        text, code = options.command(options)
    except KvdistError as error:
        return end_with(error, USAGE_ERROR if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return int(code) if _show(text) else 1


REMOVED = {"export": {"--average": f"it was removed: use {AVERAGES_ELSEWHERE}"}}
"""Subcommand → its options of earlier versions → what to use instead."""


def overview() -> str:
    """The overview: what kvdist is, and its subcommands in groups, in lines of at most 80 characters."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"kvdist {__version__}: {SUMMARY}", "", f"usage: {USAGE}"]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {one.about}" for name, one in group.items())]
    return "\n".join(lines)


HINTS = """\
kvdist COMMAND --help shows the arguments of a command. Where DMLC_ROLE is
scheduler or server, kvdist is that process: kvdist --help has its options."""


def _parser() -> Parser:
    """The parser of the words of a scheduler or a server; its help has the overview."""
    _, _, groups = overview().partition(f"usage: {USAGE}\n\n")
    parser = Parser(
        prog="kvdist",
        usage=USAGE,
        description=f"kvdist {__version__}: {SUMMARY}\n\n{groups}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        instead={name: f"kvdist launch {name} ... starts a job" for name in ("-n", "-s", "-H")},
    )
    process = parser.add_argument_group("options of the process that kvdist is where DMLC_ROLE is scheduler or server")
    for option, about in (
        (
            "--server-module",
            "import a module with optimizers (kvdist.optimizer.register) or commands (kvdist.kv.register_command)",
        ),
        ("--optimizer-module", "the older name of --server-module"),
    ):
        process.add_argument(option, action="append", default=[], metavar="MODULE", help=about)
    process.add_argument(
        "--server-device",
        metavar="DEVICE",
        help="where a server sums and updates: cpu, cuda:0, or a list such as cuda:0,cuda:1 that servers take in turn"
        " (default: what KVDIST_SERVER_DEVICE says, or cpu)",
    )
    process.add_argument("--verbose", action="store_true", help="log which kernels a server uses")
    parser.add_argument("--version", action="version", version=f"kvdist {__version__}")
    return parser


def _show(text: str) -> bool:
    """Print a text. Returns whether standard output took it; if not, the reason is on standard error."""
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter tries again at its end
        end_with(f"standard output cannot be written to ({error.strerror})", 1)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
