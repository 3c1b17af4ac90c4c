"""``--emit kubernetes``: a JobSet with one replicated job a role, a headless service, and a secret, as YAML.

Ranks are the completion indexes of indexed jobs. The JobSet succeeds when all workers have. It needs the JobSet
controller (jobset.x-k8s.io) in the cluster; Kubernetes itself has no job with several roles.

Every text is written in double quotes, so that YAML can read it as nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.emit.roles import RoleSpec

Value = str | int | bool | Mapping[str, "Value"] | Sequence["Value"]

WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML 1.1 reads as something else than text if they are not quoted."""

ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}


def document(value: Mapping[str, Value]) -> str:
    """The lines of one document.

    Raises:
        ConfigError: a text has bytes that are not UTF-8, which YAML cannot hold.
    """
    return "\n".join(_mapping(value, "")) + "\n"


def _mapping(value: Mapping[str, Value], indent: str) -> list[str]:
    lines: list[str] = []
    for key, each in value.items():
        is_plain = key.isascii() and key.isidentifier() and key.lower() not in WORDS
        name = key if is_plain else _quoted(key)
        lines += _under(f"{indent}{name}:", each, indent + "  ")
    return lines


def _under(head: str, value: Value, indent: str) -> list[str]:
    if isinstance(value, Mapping):
        return [head, *_mapping(value, indent)] if value else [f"{head} {{}}"]
    if isinstance(value, str | int):
        return [f"{head} {_scalar(value)}"]
    return [head, *(line for each in value for line in _item(each, indent))] if value else [f"{head} []"]


def _item(value: Value, indent: str) -> list[str]:
    if isinstance(value, Mapping) and value:
        first, *rest = _mapping(value, indent + "  ")
        return [f"{indent}- {first.lstrip(' ')}", *rest]
    return _under(f"{indent}-", value, indent + "  ")


def _scalar(value: str | int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else _quoted(value)


def _quoted(text: str) -> str:
    return '"' + "".join(map(_escaped_letter, text)) + '"'


def _escaped_letter(letter: str) -> str:
    if letter in ESCAPES:
        return ESCAPES[letter]
    if letter.isprintable():
        return letter
    if 0xD800 <= ord(letter) <= 0xDFFF:
        raise ConfigError("a word or a variable of the job has bytes that are not UTF-8; YAML cannot hold them")
    return f"\\U{ord(letter):08x}"


RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
SECRET_FOLDER = "/run/kvdist"

WAIT_FOR_NAME = """\
import socket, sys, time
for _ in range(300):
    try:
        socket.getaddrinfo(sys.argv[1], None)
        break
    except OSError:
        time.sleep(1)
"""
"""A pod's name resolves a moment after the pod runs; a process that asks too early would fail."""


def kubernetes(roles: Sequence[RoleSpec], name: str, image: str, port: int, secret: str | None) -> str:
    """The manifests, for ``kubectl apply -f``.

    Args:
        name: of everything in them: a DNS label.
        image: the container image, which has kvdist and the user's program.
        secret: in base64; None leaves encryption out.
    """
    documents: list[dict[str, Value]] = []
    if secret is not None:
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name},
                "type": "Opaque",
                "data": {"secret": secret},
            }
        )
    documents.append(_service(name))
    jobs = [_replicated_job(spec, name, image, port, secret is not None) for spec in roles]
    documents.append(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [str(Role.WORKER)]},
                "failurePolicy": {"maxRestarts": 0},
                "startupPolicy": {"startupPolicyOrder": "InOrder"},
                "replicatedJobs": jobs,
            },
        }
    )
    head = "# kubectl apply -f FILE; logs: kubectl logs -l jobset.sigs.k8s.io/jobset-name=NAME --prefix -f\n"
    return head.replace("NAME", name) + "---\n".join(map(document, documents))


def _service(name: str) -> dict[str, Value]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"jobset.sigs.k8s.io/jobset-name": name},
        },
    }


def _replicated_job(spec: RoleSpec, name: str, image: str, port: int, is_secret: bool) -> Value:
    scheduler = f"{name}-{Role.SCHEDULER}-0-0.{name}"
    pod: dict[str, Value] = {
        "restartPolicy": "Never",
        "containers": [_container(spec, image, scheduler, port, is_secret)],
        "volumes": _volumes(name, is_secret),
    }
    if spec.role is not Role.SCHEDULER:
        wait: dict[str, Value] = {"name": "wait-for-scheduler", "image": image}
        pod["initContainers"] = [{**wait, "command": ["python", "-c", WAIT_FOR_NAME, scheduler]}]
    job: dict[str, Value] = {
        "parallelism": spec.count,
        "completions": spec.count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {"name": str(spec.role), "replicas": 1, "template": {"spec": job}}


def _container(spec: RoleSpec, image: str, scheduler: str, port: int, is_secret: bool) -> dict[str, Value]:
    env: list[Value] = [
        {"name": variable, "value": _escaped(text)}
        for variable, text in sorted({**spec.environment.defaults, **spec.environment.settings}.items())
    ]
    if spec.role is Role.SCHEDULER:
        # It binds an address; the name of a pod stands for it only elsewhere.
        env.append({"name": "DMLC_PS_ROOT_URI", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    else:
        env.append({"name": "DMLC_PS_ROOT_URI", "value": scheduler})
    env.append({"name": "DMLC_PS_ROOT_PORT", "value": str(port)})
    env.append({"name": "KVDIST_RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK_FIELD}}})
    mounts: list[Value] = [{"name": "memory", "mountPath": "/dev/shm"}]
    if spec.role is Role.WORKER:
        # A pod is a host of its own.
        env.append({"name": "KVDIST_LOCAL_RANK", "value": "0"})
        env.append({"name": "KVDIST_LOCAL_SIZE", "value": "1"})
        env.append({"name": "KVDIST_CROSS_RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK_FIELD}}})
        env.append({"name": "KVDIST_CROSS_SIZE", "value": str(spec.count)})
    if is_secret:
        env.append({"name": "KVDIST_SECRET_FILE", "value": f"{SECRET_FOLDER}/secret"})
        mounts.append({"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True})
    return {
        "name": str(spec.role),
        "image": image,
        "command": [_escaped(word) for word in spec.argv],
        "env": env,
        "volumeMounts": mounts,
    }


def _volumes(name: str, is_secret: bool) -> list[Value]:
    volumes: list[Value] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    if is_secret:
        volumes.append({"name": "secret", "secret": {"secretName": name, "defaultMode": 0o400}})
    return volumes


def _escaped(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in words and values; two dollars stand for one."""
    return text.replace("$", "$$")
