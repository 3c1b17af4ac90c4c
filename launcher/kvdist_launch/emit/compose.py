"""``--emit compose``: a file for Docker Compose with one service a process, as every process has a rank of its own."""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.nodes import NodeId, Role
from kvdist_launch.emit.parts import Part, on_one_host
from kvdist_launch.emit.yaml import Value, document

SECRET = "kvdist"
ANY_ADDRESS = "0.0.0.0"
"""Of a container, in a network of the job's own."""
EVERY_WORKER = "docker compose up --abort-on-container-failure"


def compose(parts: Sequence[Part], name: str, image: str, port: int, is_secret: bool) -> str:
    """The file ``compose.yaml``.

    Args:
        name: of the project.
        image: the container image, which has kvdist and the user's program.
        is_secret: whether the processes get a common secret to encrypt with.
    """
    services: dict[str, Value] = {}
    for part in parts:
        for rank in range(part.count):
            services[str(NodeId(part.role, rank))] = _service(part, rank, image, port, is_secret)
    project: dict[str, Value] = {"name": name, "services": services}
    head = f"# {EVERY_WORKER}\n"
    if is_secret:
        project["secrets"] = {SECRET: {"file": "./kvdist.secret"}}
        head = f"# (umask 077; head -c 32 /dev/urandom > kvdist.secret)\n{head}"
    return head + document(project)


def _service(part: Part, rank: int, image: str, port: int, is_secret: bool) -> dict[str, Value]:
    is_scheduler = part.role is Role.SCHEDULER
    env = {**part.environment.defaults, **part.environment.settings}
    env["DMLC_PS_ROOT_URI"] = ANY_ADDRESS if is_scheduler else str(Role.SCHEDULER)
    env["DMLC_PS_ROOT_PORT"] = str(port)
    env["KVDIST_RANK"] = str(rank)
    env |= on_one_host(part, str(rank))
    if is_secret:
        env["KVDIST_SECRET_FILE"] = f"/run/secrets/{SECRET}"
    service: dict[str, Value] = {
        "image": image,
        "init": True,
        "entrypoint": [],
        "command": [_escaped(word) for word in part.argv],
        "environment": {variable: _escaped(text) for variable, text in sorted(env.items())},
    }
    if not is_scheduler:
        service["depends_on"] = [str(Role.SCHEDULER)]
    if is_secret:
        service["secrets"] = [SECRET]
    return service


def _escaped(text: str) -> str:
    """Compose replaces ``$NAME``; two dollars stand for one."""
    return text.replace("$", "$$")
