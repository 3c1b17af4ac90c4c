"""Endpoints as text, ``tcp://host:port`` and ``ipc:///path``, and lists of hosts.

Pure; `kvdist.config.addresses` asks the system.
"""

from __future__ import annotations

import ipaddress
import itertools
import math
import re


def tcp_endpoint(host: str, port: int) -> str:
    """``tcp://host:port`` with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of a tcp:// endpoint, without brackets."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def stays_on_host(endpoint: str) -> bool:
    """Whether bytes sent to an endpoint stay on this machine, where sending is as fast as memory."""
    if endpoint.startswith("ipc://"):
        return True
    address = endpoint.removeprefix("tcp://")
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    return address != endpoint and is_loopback(host)


def crosses_network(endpoint: str) -> bool:
    """Whether bytes sent to an endpoint may leave this machine."""
    return endpoint.startswith("tcp://") and not stays_on_host(endpoint)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` (a name or an address)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def expand_ranges(text: str, most: int) -> list[str]:
    """Host names for a text with ranges in brackets, such as ``gpu[01-08]`` or ``r[1-2]n[1,3,5-7]``.

    A range keeps the zeros of its first number.

    Args:
        text: the text; a name without ranges stands for itself.
        most: largest number of names.

    Raises:
        ValueError: a range is not valid, or the names are too many; the message has the remedy.
    """
    parts = re.split(r"\[([^\[\]]*)\]", text)
    choices = [_numbers(part, most) if index % 2 else [part] for index, part in enumerate(parts)]
    count = math.prod(map(len, choices))
    if count > most:
        raise ValueError(f"these are {count} hosts; at most {most} are possible")
    return ["".join(words) for words in itertools.product(*choices)]


def _numbers(text: str, most: int) -> list[str]:
    numbers: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", item)
        if match is None:
            raise ValueError(f"{text[:80]!a} is not a range; write numbers, as in host[01-08] or host[1,3,5-7]")
        first, last = match.group(1), match.group(2) or match.group(1)
        if int(last) < int(first):
            raise ValueError(f"the range {item} runs backwards; write the smaller number first")
        if len(first) != len(last) and "0" in (first[0], last[0]) and first != "0":
            raise ValueError(f"the two numbers of {item} have different widths; write as many zeros before both")
        if int(last) - int(first) >= most - len(numbers):
            raise ValueError(f"the range {item} has more than {most} hosts")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
