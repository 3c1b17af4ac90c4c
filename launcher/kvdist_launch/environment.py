"""The environment of a process, as changes to the environment of its host.

An agent knows the variables of its host; the launcher knows what the user wants. So an `Environment` has three layers:
``defaults`` that both the host and the user may override, ``front`` which goes before a search path of the host, and
``settings`` which win. Values reach a process byte for byte; no
shell ever sees a value.

torchrun's variables (RANK, WORLD_SIZE and so on) are never set: libraries would go distributed on seeing them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvdist.config.environment import TAKEN
from kvdist.config.settings import TABLE, TWINS
from kvdist.errors import ConfigError

SECURITY_VARIABLES = ("KVDIST_SECURITY", "KVDIST_SECRET_FILE")
"""Set by the user for the job as a whole; the launcher reads them, and sets them for every process."""

RESTARTS = "KVDIST_RESTARTS"
"""Variable with the number of restarts of a process or of its job."""

OWNED_VARIABLES = frozenset(
    name
    for section in ("Who a process is", "Set by the launcher")
    for row in TABLE[section]
    for name in (row.variable, *row.aliases)
) | {TAKEN, *SECURITY_VARIABLES}
"""The identity of a process: set by the launcher alone, and never inherited from its environment."""

OTHER_NAME = {**TWINS, **{theirs: ours for ours, theirs in TWINS.items()}}
"""For each variable that has two names, the other name."""

ADDRESS_VARIABLES = frozenset({"KVDIST_NODE_HOST", "DMLC_NODE_HOST"})
"""Variables that are true for the launching machine only."""

FORWARDED_PREFIXES = (
    "CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KVDIST_", "MXNET_", "DMLC_", "PS_", "HOROVOD_", "TORCH_", "PYTORCH_",
    "LC_",
)  # fmt: skip
FORWARDED_NAMES = frozenset({"HF_HOME", "LANG"})
FRONT_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH")
"""Forwarded to other hosts without being asked for: the first two win on the host, the last goes before its value."""

SECRET_WORDS = ("SECRET", "TOKEN", "KEY", "PASS", "CREDENTIAL")
"""Parts of names of variables whose values are hidden, and forwarded only on request."""

HIDDEN = "(hidden)"

SYSTEM_FOLDERS = frozenset({"/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin"})
"""Folders that every PATH has; a folder in front would only reorder them."""

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True)
class Environment:
    """Changes to the environment of a host.

    Attributes:
        defaults: values of variables that the host does not set.
        front: paths that go before those of the host.
        settings: values that win over the host's.
    """

    defaults: Mapping[str, str] = field(default_factory=dict)
    front: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)

    def over(self, base: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of a process on a host whose variables are `base`.

        Identity in `base` is left out: a job may be started inside another job.
        """
        env = {name: value for name, value in base.items() if name not in OWNED_VARIABLES}
        for name, value in self.defaults.items():
            if OTHER_NAME.get(name) not in env:
                env.setdefault(name, value)
        for name, value in self.front.items():
            env[name] = in_front(value, env.get(name) or (os.defpath if name == "PATH" else ""))
        for name in self.settings:
            # Otherwise the variable's other name would keep the value that this one replaces.
            env.pop(OTHER_NAME.get(name, ""), None)
        return {**env, **self.settings}


def in_front(path: str, rest: str) -> str:
    """The search path `path:rest`, or `rest` if it begins with `path` already."""
    if not rest or not path:
        # An empty part of a search path would be the current folder.
        return path or rest
    return rest if f"{rest}:".startswith(f"{path}:") else f"{path}:{rest}"


def interpreter_front(python: str) -> dict[str, str]:
    """What goes before PATH so that ``python`` is the interpreter `python`, and tools beside it come first."""
    folder = os.path.dirname(python)
    return {} if not folder or folder in SYSTEM_FOLDERS else {"PATH": folder}


def looks_secret(name: str) -> bool:
    """Whether a variable's value should be hidden, by its name."""
    return any(word in name.upper() for word in SECRET_WORDS)


def forwarded(environ: Mapping[str, str]) -> tuple[Environment, list[str]]:
    """The launcher's variables that other hosts get, and the names left out because they look secret."""
    settings, secret = {}, []
    for name, value in environ.items():
        if name in OWNED_VARIABLES or name in ADDRESS_VARIABLES or not re.fullmatch(NAME, name):
            continue
        if name in FORWARDED_NAMES or name.startswith(FORWARDED_PREFIXES):
            if looks_secret(name):
                secret.append(name)
            else:
                settings[name] = value
    front = {name: environ[name] for name in FRONT_NAMES if environ.get(name)}
    return Environment(front=front, settings=settings), sorted(secret)


def redacted(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with secret-looking values hidden."""
    return {name: HIDDEN if looks_secret(name) else value for name, value in variables.items()}


def overlay(variables: dict[str, str], changes: Mapping[str, str]) -> None:
    """Set `changes` in `variables`; of a variable with two names the other name is dropped."""
    for name, value in changes.items():
        variables.pop(OTHER_NAME.get(name, ""), None)
        variables[name] = value


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dictionary; MXNet's ``NAME:VALUE`` is understood too.

    The first character that cannot be part of a name decides, so values may contain both separators.

    Raises:
        ConfigError: a text has neither form, or names a variable that the launcher sets itself.
    """
    variables: dict[str, str] = {}
    for text in texts:
        match = re.fullmatch(rf"({NAME})[=:](.*)", text, re.DOTALL)
        if match is None:
            raise ConfigError(
                f"{text!r} does not set a variable; write NAME=VALUE, as in --env LOG_LEVEL=debug, or -x NAME to pass"
                " on its present value"
            )
        name, value = match.groups()
        _assign(variables, name, value)
    return variables


def parse_exports(texts: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``-x NAME`` (with the value in `environ`) and ``-x NAME=VALUE``.

    Raises:
        ConfigError: a text has neither form, names a variable that is not set, or a variable that the launcher
            sets itself.
    """
    variables: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not re.fullmatch(NAME, name):
            raise ConfigError(f"-x {text!r} is not the name of a variable; write -x NAME or -x NAME=VALUE")
        if not separator and name not in environ:
            raise ConfigError(f"-x {name}: this variable is not set; set it, or write -x {name}=VALUE")
        _assign(variables, name, value if separator else environ[name])
    return variables


def read_env_file(path: str) -> dict[str, str]:
    """The variables of the file `path`; see `parse_env_file`.

    Raises:
        ConfigError: it cannot be read, or a line is not valid.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        text = data.decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise ConfigError(f"--env-file {path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"--env-file {path} has more than {FILE_BYTES_MAX} bytes; is it the right file?")
    return parse_env_file(text, path)


def parse_env_file(text: str, name: str) -> dict[str, str]:
    r"""The variables of lines ``NAME=VALUE``, written as for docker compose.

    ``#`` begins a comment at the start of a line or behind a blank. Single quotes keep everything; inside double
    quotes ``\n``, ``\t``, ``\"``, ``\$`` and ``\\`` mean a line end, a tab, and themselves. Nothing is substituted:
    ``$HOME`` stays as it is.

    Args:
        text: the whole file.
        name: the file's name, for messages.

    Raises:
        ConfigError: a line is not valid; the message has the file and the line.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            match = re.fullmatch(rf"(?:export[ \t]+)?({NAME})[ \t]*=[ \t]*(.*)", line)
            if match is None:
                raise ConfigError("not an assignment; write NAME=VALUE")
            _assign(variables, match[1], _unquoted(match[2]))
        except ConfigError as error:
            # The line itself is not repeated: it may hold a secret.
            raise ConfigError(f"--env-file {name}, line {number}: {error}") from None
    return variables


ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def _unquoted(text: str) -> str:
    quote = text[:1]
    if not quote or quote not in "\"'":
        return re.split(r"(?:^|[ \t]+)#", text, maxsplit=1)[0]
    inside = r"[^']*" if quote == "'" else r'(?:[^"\\]|\\.)*'
    match = re.fullmatch(rf"{quote}({inside}){quote}(?:[ \t]*|[ \t]+#.*)", text)
    if match is None:
        raise ConfigError("the quotes do not match; a line end inside double quotes is written \\n")
    if quote == "'":
        return match.group(1)
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found.group(1), found.group(1)), match.group(1))


def _assign(variables: dict[str, str], name: str, value: str) -> None:
    """Set a variable that the user wants, and that the launcher does not set itself."""
    if name in OWNED_VARIABLES and name not in SECURITY_VARIABLES:
        raise ConfigError(f"{name} is set by the launcher for each process; leave it out")
    if "\0" in value:
        raise ConfigError(f"the value of {name} contains a zero byte, which no environment can hold")
    variables[name] = value
