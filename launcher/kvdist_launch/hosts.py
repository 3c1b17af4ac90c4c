"""The machines of a job: the grammar of hostfiles and of ``-H``.

A line of a hostfile is ``[user@]host[:port] [attribute=value ...]``. In a file ``host:N`` is the ssh port, as in
MXNet; in a list on the command line (``-H a:2,b:2``) N is the number of slots, as in Horovod.

The grammar is strict because these words end up in the argument lists of ssh and rsync: nothing that begins with
``-``, no blank, no quote and no shell character is part of a host's name, even if ssh would accept it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvdist.config.endpoints import expand_ranges
from kvdist.config.paths import expanded
from kvdist.config.suggestions import nearest
from kvdist.errors import ConfigError
from kvdist.nodes import Role

HOSTS_MAX = 4096
"""Largest number of hosts; a range in brackets that exceeds it is a mistake."""

FILE_BYTES_MAX = 1 << 20
SHOWN_MAX = 80
"""Characters of a wrong line that an error repeats."""

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

EXAMPLE_HOSTFILE = """\
# One host a line: a name that ssh knows (an alias of ~/.ssh/config too), or an address.
d1
d2 slots=4                        # at most 4 workers; servers are not counted
alice@d3:2222                     # ssh user and port; the same as: d3 user=alice port=2222

# Eight hosts, gpu01 to gpu08, whose workers share the GPUs 0 to 3.
gpu[01-08] slots=4 gpus=0,1,2,3 role=worker

# What is possible: slots= port= user= identity= known_hosts= python= gpus= iface= role=server|worker|any
# identity= is a private key for ssh, known_hosts= a file with the keys of hosts, both on this machine.
store[1,3,5-7] role=server iface=eth1
[fd00::17] python=/opt/conda/bin/python
"""
"""Text that ``--example-hostfile`` prints."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine.

    Attributes:
        name: for ssh: a name, an alias or an address (IPv6 without brackets), as it was written, because aliases of
            ssh's configuration are case-sensitive.
        slots: the largest number of workers; None is any number.
        port: the port of its ssh daemon; None leaves that to ssh's configuration.
        user: the login name; None leaves that to ssh's configuration.
        identity: the file of the private key, on this machine; None leaves that to ssh's configuration.
        known_hosts: the file of the keys of hosts, on this machine; None leaves that to ssh's configuration.
        python: its interpreter; None is the path of the launcher's.
        gpus: the devices that its workers share, as in CUDA_VISIBLE_DEVICES.
        iface: the network interface that its processes use.
        role: the only role that may run on it, server or worker; None is both.
        is_alone: whether ``-H`` consists of its name alone, which may have been meant as the name of a hostfile.
    """

    name: str
    slots: int | None = None
    port: int | None = None
    user: str | None = None
    identity: str | None = None
    known_hosts: str | None = None
    python: str | None = None
    gpus: tuple[str, ...] | None = None
    iface: str | None = None
    role: Role | None = None
    is_alone: bool = field(default=False, compare=False)

    @property
    def asks_for_ssh(self) -> bool:
        """Whether an attribute is set that only ssh uses, so that even this machine is reached by ssh."""
        return any(one is not None for one in (self.port, self.user, self.identity, self.known_hosts))

    @property
    def is_local(self) -> bool:
        """Whether it is this machine, reached without ssh."""
        return self.name.lower() in LOCAL_NAMES and not self.asks_for_ssh

    @property
    def machine(self) -> tuple[str, int | None]:
        """Key that is equal for two lines about the same machine; ports of an address may lead to several machines."""
        return ("localhost", None) if self.is_local else (self.name.lower(), self.port)

    def takes(self, role: Role) -> bool:
        """Whether processes of the role may run on it."""
        return self.role is None or self.role is role

    def __str__(self) -> str:
        return self.name


def read_hosts(text: str) -> list[Host]:
    """The hosts of ``-H text``: those of the file of that name, or else of the list itself.

    Raises:
        ConfigError: the file cannot be read, or the hosts are not valid; the message names the line and the correction.
    """
    path = Path(expanded(text))
    if path.is_dir():
        raise ConfigError(f"-H {text} is a directory; name a hostfile in it, or a list such as -H a:2,b:2")
    if path.is_file():
        return parse_hostfile(_read(path), text)
    if "/" in text or text.lower() in _FILE_NAMES or path.suffix.lower() in _FILE_SUFFIXES:
        raise ConfigError(
            f"-H {_shown(text)}: there is no such file, and it does not look like a list of hosts either. Write the"
            " hostfile (kvdist-launch --example-hostfile prints one), or a list such as -H a:2,b:2"
        )
    hosts = parse_host_list(text)
    if len(hosts) > 1 or hosts[0].name != text or hosts[0].is_local:
        return hosts
    near = _hostfile_like(text)
    if near:
        raise ConfigError(f"-H {text}: there is no such file; did you mean -H {near}? A host of that name is {text}:1")
    return [replace(hosts[0], is_alone=True)]


def _hostfile_like(text: str) -> str:
    """The hostfile of the current folder with the most similar name; '' if none is similar."""
    try:
        names = [one.name for one in os.scandir() if one.is_file() and one.stat().st_size <= FILE_BYTES_MAX]
    except OSError:
        return ""
    for name in nearest(text, names, 0.7, most=3):
        with contextlib.suppress(ConfigError):
            parse_hostfile(_read(Path(name)), name)
            return name
    return ""


def read_hostfile(name: str) -> list[Host]:
    """The hosts of the file of that name.

    Raises:
        ConfigError: it cannot be read, or a line is not valid.
    """
    return parse_hostfile(_read(Path(name)), name)


_FILE_NAMES = frozenset({"hosts", "hostfile", "host_file", "hostsfile", "hosts_file", "machines", "machinefile"})
_FILE_SUFFIXES = frozenset({".txt", ".hosts", ".conf", ".cfg", ".list", ".lst"})


def parse_hostfile(text: str, name: str) -> list[Host]:
    """The hosts of a hostfile's text, in its order.

    Args:
        text: the whole file.
        name: the file's name, for messages.

    Raises:
        ConfigError: a line is not valid; the message names the file, the line and the correction.
    """
    lines = [(f"{name}, line {number}: ", line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1)]
    return _all_hosts(
        lines, _hosts_of_line, f"{name} contains no host; kvdist-launch --example-hostfile prints an example"
    )


def parse_host_list(text: str) -> list[Host]:
    """The hosts of a list like ``a:2,b:2``, where the numbers are slots.

    Raises:
        ConfigError: an entry is not valid; the message names the entry and the correction.
    """
    entries = [("-H: ", entry) for entry in re.split(r",(?![^\[]*\])", text)]
    return _all_hosts(
        entries, _hosts_of_entry, "-H contains no host; write a list such as -H a:2,b:2, or the name of a hostfile"
    )


def _hosts_of_entry(entry: str) -> Iterator[Host]:
    if "=" in entry:
        raise _Wrong("attributes belong in a hostfile; in a list write HOST or HOST:SLOTS")
    for host in _hosts_of_address(entry.strip()):
        # The grammar has one number behind the colon; only its meaning differs from that of a file.
        yield replace(host, slots=host.port, port=None)


class _Wrong(Exception):
    """A line is not valid; the message says how to correct it."""


def _all_hosts(texts: Iterable[tuple[str, str]], parse: Callable[[str], Iterable[Host]], none_found: str) -> list[Host]:
    """The hosts of several texts.

    Args:
        texts: each with the words before it in an error.
        parse: returns the hosts of a text; raises `_Wrong` if the text is not valid.
        none_found: the error if there is no host.
    """
    hosts: dict[tuple[str, int | None], Host] = {}
    for where, text in texts:
        try:
            for host in parse(text):
                if host.machine in hosts:
                    raise _Wrong(f"{host} is named twice; write it once: {host}:2 in a list, slots=2 in a file")
                if len(hosts) == HOSTS_MAX:
                    raise _Wrong(f"these are more than {HOSTS_MAX} hosts; check the ranges in brackets")
                hosts[host.machine] = host
        except _Wrong as error:
            raise ConfigError(f"{where}{_shown(text.strip())}: {error}") from None
    if not hosts:
        raise ConfigError(none_found)
    return list(hosts.values())


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"the hostfile {path} cannot be read: {error.strerror}") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"the hostfile {path} has more than {FILE_BYTES_MAX} bytes; is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the hostfile {path} is not text in UTF-8; is it the right file?") from error


def _shown(text: str) -> str:
    return ascii(text) if len(text) <= SHOWN_MAX else ascii(text[:SHOWN_MAX]) + "..."


_WORD = re.compile(r"""[ \t]+|#.*|(?P<word>(?:"[^"]*"|'[^']*'|[^ \t"'])+)|(?P<quote>.)""", re.DOTALL)
"""A blank, a comment, a word with quotes that keep blanks together, or a quote that is not closed."""


def _words(line: str) -> list[str]:
    """The words of a line without its comment; quotes are left out."""
    found = list(_WORD.finditer(line))
    if any(match["quote"] for match in found):
        raise _Wrong("a quote is not closed; write both, as in python='/my programs/python'")
    return [re.sub(r"""(["'])(.*?)\1""", r"\2", match["word"]) for match in found if match["word"]]


def _hosts_of_line(line: str) -> Iterator[Host]:
    words = _words(line)
    attributes: dict[str, object] = {}
    for word in words[1:]:
        name, separator, value = word.partition("=")
        if not separator:
            raise _Wrong(f"{_shown(word)} is not an attribute; write name=value, one host a line")
        if name not in _ATTRIBUTES:
            raise _Wrong(f"unknown attribute {_shown(name)}; known are {', '.join(_ATTRIBUTES)}")
        if name in attributes:
            raise _Wrong(f"{name}= is given twice")
        attributes[name] = _ATTRIBUTES[name](value)
    if attributes.get("role") is Role.SERVER and "slots" in attributes:
        raise _Wrong("slots= counts workers, and a host with role=server takes none; leave one of them out")
    for host in _hosts_of_address(words[0]) if words else ():
        for name, said in (("port", host.port), ("user", host.user)):
            if said is not None and name in attributes:
                raise _Wrong(f"{name}= is given beside the {name} in {_shown(words[0])}; write it once")
        yield replace(host, **attributes)  # type: ignore[arg-type]  # the table gives each attribute its own type


_HOSTNAME = r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"
_IFACE = r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}"


def _hosts_of_address(text: str) -> Iterator[Host]:
    """The hosts of ``[user@]host[:N]``, with N as the port."""
    user, separator, rest = text.rpartition("@")
    user_checked = _user(user) if separator else None
    match = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::([^:]*))?", rest)
    if match is None:
        raise _Wrong(f"an IPv6 address needs brackets: write [{rest}]" if _is_ipv6(rest) else _NOT_A_HOST)
    name, number = match.groups()
    port = None if number is None else _number(number, "the number behind the colon", 65535)
    try:
        names = [_ipv6(name[1:-1])] if name.startswith("[") else list(map(_name, expand_ranges(name, HOSTS_MAX)))
    except ValueError as error:
        raise _Wrong(str(error)) from None
    for each in names:
        yield Host(each, port=port, user=user_checked)


_NOT_A_HOST = (
    "not a valid host name; write a name of letters, digits, dots, hyphens and underscores that begins with a"
    " letter or digit, or an address, as in: d1, alice@d1, 10.0.0.7, [fd00::17]"
)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _ipv6(text: str) -> str:
    address, separator, zone = text.partition("%")
    if not _is_ipv6(address) or (separator and not re.fullmatch(_IFACE, zone)):
        raise _Wrong(f"{_shown(text)} is not an IPv6 address; write one, as in [fd00::17], or a range as in host[1-4]")
    return str(ipaddress.ip_address(address)) + separator + zone


def _name(text: str) -> str:
    labels = text.split(".")
    if len(text) > 253 or not all(len(label) <= 63 and re.fullmatch(_HOSTNAME, label) for label in labels):
        raise _Wrong(_NOT_A_HOST)
    if not text.replace(".", "").isdigit():
        return text
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        # The system's resolver would take 10.1 or 1234 for an address too, and reach an unexpected machine.
        raise _Wrong(f"{text} is not an IPv4 address, and a host name needs at least one letter") from None


def _number(text: str, what: str, most: int) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise _Wrong(f"{what} is {_shown(text)}; write a number from 1 to {most}")
    return int(text)


def _matching(what: str, pattern: str, advice: str) -> Callable[[str], str]:
    """A parser of words that match `pattern`."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text) or not text.isprintable():
            raise _Wrong(f"{what} is {_shown(text)}; write {advice}")
        return text

    return parse


def _gpus(text: str) -> tuple[str, ...]:
    devices = tuple(text.split(","))
    if not all(re.fullmatch(r"[0-9]{1,4}|(?:GPU|MIG)-[A-Za-z0-9/-]{1,80}", device) for device in devices):
        raise _Wrong(f"gpus= is {_shown(text)}; write the devices with commas between, as in gpus=0,1")
    if len(set(devices)) < len(devices):
        raise _Wrong(f"gpus= is {_shown(text)}, which has a device twice")
    return devices


def _role(text: str) -> Role | None:
    roles = {"server": Role.SERVER, "worker": Role.WORKER, "any": None}
    if text not in roles:
        raise _Wrong(f"role= is {_shown(text)}; write role=server, role=worker or role=any")
    return roles[text]


def _file_of_keys(what: str, text: str, must_exist: bool = False) -> str:
    """The checked path of a file of ssh on this machine."""
    _matching(what, r'[^-"][^"]*', "the path of a file on this machine, as in identity=~/.ssh/lab")(text)
    try:
        path = expanded(text)
    except ConfigError as error:
        raise _Wrong(f"{what} {error}") from None
    if must_exist and not os.path.isfile(path):
        raise _Wrong(f"{what} is {_shown(text)}, and there is no such file on this machine; name the private key")
    return path


_user = _matching("the user", _USER, "letters and digits, and inside also . _ -")

_ATTRIBUTES: dict[str, Callable[[str], object]] = {
    "slots": lambda text: _number(text, "slots=", HOSTS_MAX),
    "port": lambda text: _number(text, "port=", 65535),
    "user": _user,
    "identity": lambda text: _file_of_keys("identity=", text, must_exist=True),
    "known_hosts": lambda text: _file_of_keys("known_hosts=", text),
    "python": _matching("python=", "[^-].*", "a path, as in python=/opt/conda/bin/python"),
    "gpus": _gpus,
    "iface": _matching("iface=", _IFACE, "the name of a network interface, as in iface=eth1"),
    "role": _role,
}
