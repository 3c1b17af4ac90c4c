"""``--emit systemd``: units for one machine: a service for the scheduler, templates for servers and workers, a target.

The number of an instance is its rank. All processes use the loopback address, so nothing needs to be encrypted.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.emit.parts import Part, on_one_host
from kvdist_launch.environment import in_front, looks_secret
from kvdist_launch.preview import escaped

FOLDER = "/etc/systemd/system"
ADDRESS = "127.0.0.1"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def systemd(parts: Sequence[Part], name: str, port: int, folder: str) -> dict[str, str]:
    """The units: path of each → its text.

    Args:
        name: what their names begin with.
        folder: where the processes start.

    Raises:
        ConfigError: a variable looks secret; units can be read by everybody.
    """
    wanted = [
        f"{name}-{part.role}.service" if part.role is Role.SCHEDULER else f"{name}-{part.role}@{rank}.service"
        for part in parts
        for rank in range(part.count)
    ]
    units = {f"{FOLDER}/{name}.target": _target(name, wanted)}
    for part in parts:
        template = "" if part.role is Role.SCHEDULER else "@"
        units[f"{FOLDER}/{name}-{part.role}{template}.service"] = _service(part, name, port, folder)
    return units


def _target(name: str, wanted: Sequence[str]) -> str:
    lines = ["[Unit]", f"Description=kvdist job {name}", *(f"Wants={unit}" for unit in wanted)]
    return "\n".join(lines) + "\n"


def _service(part: Part, name: str, port: int, folder: str) -> str:
    is_scheduler = part.role is Role.SCHEDULER
    variables = _variables(part)
    variables |= {"DMLC_PS_ROOT_URI": ADDRESS, "DMLC_PS_ROOT_PORT": str(port)}
    environment = [f"Environment={_quoted(f'{variable}={text}')}" for variable, text in sorted(variables.items())]
    rank = "0" if is_scheduler else "%i"
    environment.append(f"Environment=KVDIST_RANK={rank}")
    environment += [f"Environment={variable}={text}" for variable, text in on_one_host(part, "%i").items()]
    lines = [
        "[Unit]",
        f"Description=kvdist {part.role}{'' if is_scheduler else ' %i'} of {name}",
        f"PartOf={name}.target",
        *([] if is_scheduler else [f"After={name}-{Role.SCHEDULER}.service"]),
        "",
        "[Service]",
        "Type=exec",
        f"WorkingDirectory={_specifier_free(folder)}",
        *environment,
        f"ExecStart={' '.join(_word(word) for word in part.argv)}",
    ]
    return "\n".join(lines) + "\n"


def _variables(part: Part) -> dict[str, str]:
    layers = part.environment
    variables = {**layers.defaults, **layers.front, **layers.settings}
    if "PATH" in layers.front:
        variables["PATH"] = in_front(layers.front["PATH"], DEFAULT_PATH)
    for name in variables:
        if looks_secret(name):
            raise ConfigError(
                f"--emit systemd: everybody can read units, and the name of {name} looks secret; leave it out here, and"
                " set it in the units with EnvironmentFile= and a file of mode 0600"
            )
    return variables


def _specifier_free(text: str) -> str:
    if not text.isprintable() or text != text.strip():
        raise ConfigError(f"--emit systemd: the path {text!r} cannot stand in a unit; use another folder")
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """A word of a command: systemd replaces ``$NAME`` there; two dollars stand for one."""
    return _quoted(text.replace("$", "$$"))


def _quoted(text: str) -> str:
    return '"' + "".join(escaped(letter, ESCAPES) for letter in text) + '"'


ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "%": "%%"}
