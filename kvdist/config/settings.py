"""Every setting of kvdist: a table, and the typed values that are read by it.

A row names the variables that set it, the form and bounds of a value, the default and the meaning. Parsing, error
messages, the launcher's options and the tables of docs/configuration.md come from the rows.

Invariants: an empty variable counts as not set; our name of a variable wins over its twin; an error names the variable
that was set. Pure: variables are an argument, and `kvdist.config.environment` alone reads those of the process.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from kvdist.config.endpoints import is_loopback
from kvdist.config.losses import LossPolicy
from kvdist.config.policies import FORMS, OFFERED, policy_from
from kvdist.config.suggestions import did_you_mean
from kvdist.errors import ConfigError
from kvdist.nodes import Role

MIB = 1 << 20
Variables = Mapping[str, str]
View = TypeVar("View")


@dataclass(frozen=True)
class Kind:
    """The form of a setting's value.

    Attributes:
        expected: completes "it must be ...".
        parse: makes the value from its text; raises ValueError or KeyError for a text of another form.
        text: makes the text from the value.
        words: the words with which a text begins, before any colon; none where a text is no word.
    """

    expected: str
    parse: Callable[[str], Any]
    text: Callable[[Any], str] = str
    words: tuple[str, ...] = ()


def whole_number(minimum: int, maximum: int | None = None) -> Kind:
    """Whole numbers from `minimum` to `maximum`."""
    return Kind(
        f"a whole number from {minimum} to {maximum}" if maximum else f"a whole number, at least {minimum}",
        lambda text: _require(int(text), lambda value: minimum <= value and (maximum is None or value <= maximum)),
    )


def seconds(minimum: float, maximum: float | None = None, *, positive: bool = False) -> Kind:
    """Finite numbers of seconds from `minimum`, which `positive` excludes, to `maximum`."""
    limit = float("inf") if maximum is None else maximum
    if maximum is not None:
        bounds = f"from {minimum:.0f} to {maximum:.0f}"
    else:
        bounds = f"above {minimum:.0f}" if positive else f"at least {minimum:.0f}"
    return Kind(
        f"a number of seconds, {bounds}",
        lambda text: _require(
            float(text),
            lambda value: minimum <= value <= limit and value < float("inf") and (value > 0 or not positive),
        ),
        repr,
    )


def word(*words: str) -> Kind:
    """Accept these words, in upper or lower case."""
    known = {each: each for each in words}
    return Kind(f"one of: {', '.join(words)}", lambda text: known[text.strip().lower()], words=words)


POLICY = Kind(f"a policy: {FORMS}", policy_from, str, tuple(OFFERED))


def _require(value: Any, holds: Callable[[Any], bool]) -> Any:
    if not holds(value):
        raise ValueError
    return value


def _port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    return _require((first, last), lambda ends: 1 <= ends[0] <= ends[1] <= 65535)  # type: ignore[no-any-return]


def _devices(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(","))
    return _require(names, lambda names: all(re.fullmatch(r"cpu|cuda:[0-9]{1,3}", name) for name in names))  # type: ignore[no-any-return]


def _modules(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    return _require(names, lambda names: all(part.isidentifier() for name in names for part in name.split(".")))  # type: ignore[no-any-return]


TEXT = Kind("a text", str)
FLAG = Kind(
    "0 or 1", lambda text: {"0": False, "1": True, "false": False, "true": True}[text.lower()], lambda on: str(int(on))
)
ROLE = Kind(
    "scheduler, server or worker", lambda text: Role(text.strip().lower()), words=("scheduler", "server", "worker")
)
PORT_RANGE = Kind(
    "a range of ports within 1-65535, the smaller one first, such as 20000-20100",
    _port_range,
    lambda ends: "{}-{}".format(*ends),
)
DEVICES = Kind(
    "cpu, cuda:0 for the first GPU of a server's host, or a list such as cuda:0,cuda:1 that the servers take in turn",
    _devices,
    ",".join,
)
MODULES = Kind(
    "names of modules as Python imports them, with commas between, such as my_rules for the file my_rules.py",
    _modules,
    ",".join,
)
PATH = Kind("a path", str)
ABSOLUTE_PATH = Kind("the absolute path of a folder", lambda text: _require(text, lambda path: path.startswith("/")))
TIMELINE = Kind("a file", lambda text: "" if text.upper() == "DYNAMIC" else text)
PATHS = (PATH, ABSOLUTE_PATH, TIMELINE)
"""Kinds whose texts `kvdist.config.environment` expands, as in ``~/runs``."""


@dataclass(frozen=True)
class Setting:
    """A row of the table.

    Attributes:
        variable: our name of the variable.
        kind: the form and bounds of a value.
        default: the value where no variable is set; None without a default, or where it depends on others.
        sentence: what the setting means, for help texts and documents.
        details: what the documents say besides, in Markdown.
        twin: the name of the variable in MXNet, ps-lite or Horovod.
        derived: a variable of another form that sets it, and how its text becomes this setting's ('' for not set).
        shown_default: how documents show the default, where its text would say too little.
    """

    variable: str
    kind: Kind
    default: Any
    sentence: str
    details: str = ""
    twin: str = ""
    derived: tuple[str, Callable[[str], str]] | None = None
    shown_default: str = ""

    @property
    def name(self) -> str:
        """The name that documents and errors use: MXNet's, where the setting is MXNet's."""
        return self.variable if self.twin.startswith("HOROVOD_") else self.twin or self.variable

    def parse(self, text: str, name: str = "") -> Any:
        """The value of a text.

        Args:
            text: the value that was set.
            name: of the variable or option that was set.

        Raises:
            ConfigError: the text has another form, or the value is out of bounds.
        """
        try:
            return self.kind.parse(text)
        except (ValueError, KeyError) as error:
            if self.kind is POLICY:  # whose message says it all
                raise ConfigError(f"{name or self.name}: {error}") from None
            shown = text if re.fullmatch(r"-?[0-9.]+", text) else repr(text)
            near = did_you_mean(text.partition(":")[0], self.kind.words)
            must = f"{near} It must be" if near else "it must be"
            raise ConfigError(f"{name or self.name} is {shown}; {must} {self.kind.expected}") from None

    def text(self, env: Variables) -> tuple[str, str]:
        """The text that is set for it, and the variable that sets it, under our name, the twin's or in another form;
        both '' where none is set.

        Raises:
            ConfigError: a variable of another form has a value that is not valid.
        """
        name = next((name for name in (self.variable, self.twin) if env.get(name)), "")
        if not name and self.derived and env.get(self.derived[0]):
            name, convert = self.derived
            text = convert(env[name])
            return text, name if text else ""
        return env.get(name, ""), name

    def read(self, env: Variables) -> Any:
        """The value that variables set, else the default.

        Raises:
            ConfigError: the value is not valid.
        """
        text, name = self.text(env)
        return self.parse(text, name) if text else self.default

    @property
    def aliases(self) -> tuple[str, ...]:
        """The other variables that set it: of MXNet, ps-lite or Horovod."""
        return (self.twin,) * bool(self.twin) + ((self.derived[0],) if self.derived else ())

    def help(self) -> str:
        """The sentence for an option of a command line, with the default."""
        default = "" if self.default is None else self.kind.text(self.default).removesuffix(".0")
        return self.sentence.replace("`", "") + (f" (default: {default})" if default else "")


def _bytes_of_elements(text: str) -> str:
    elements = Setting("MXNET_KVSTORE_SLICE_THRESHOLD", whole_number(2), None, "").parse(text)
    return str(4 * elements)


TABLE: dict[str, tuple[Setting, ...]] = {
    "Who a process is": (
        Setting("KVDIST_ROLE", ROLE, None, "`scheduler`, `server` or `worker`", twin="DMLC_ROLE"),
        Setting(
            "KVDIST_ROOT_URI", TEXT, None, "host name or address of the scheduler; of rank 0 in a job without servers",
            twin="DMLC_PS_ROOT_URI",
        ),
        Setting(
            "KVDIST_ROOT_PORT", whole_number(1, 65535), None, "TCP port at that address, 1 to 65535",
            twin="DMLC_PS_ROOT_PORT",
        ),
        Setting(
            "KVDIST_NUM_WORKER", whole_number(1), None, "number of workers, at least 1; the same in every process",
            twin="DMLC_NUM_WORKER",
        ),
        Setting(
            "KVDIST_NUM_SERVER", whole_number(0), None, "number of servers; the same in every process",
            "`0`, set by the launcher with `-s 0`: there is no scheduler either, and `kv.create('dist')` is an error"
            " that says so",
            twin="DMLC_NUM_SERVER",
        ),
        Setting(
            "KVDIST_RANK", whole_number(0), None,
            "requested rank of this process within its role; required in an encrypted job",
            shown_default="the next free one",
        ),
        Setting("KVDIST_JOB", TEXT, "default", "name of the job: messages of another job are refused"),
    ),
    "Set by the launcher": (
        Setting(
            "KVDIST_SUPERVISED", FLAG, False,
            "`1` on a scheduler whose standard input carries a line for each ended process",
            "The end of that stream is the launcher's end",
        ),
        Setting(
            "KVDIST_LOCAL_RANK", whole_number(0), None,
            "set by the launcher for workers: this worker's number among those of its machine, to choose a device by",
        ),
        Setting(
            "KVDIST_LOCAL_SIZE", whole_number(1), None,
            "set by the launcher for workers: number of workers on this machine",
        ),
        Setting(
            "KVDIST_CROSS_RANK", whole_number(0), None,
            "set by the launcher for workers: this machine's number among machines with a worker of this local rank",
        ),
        Setting(
            "KVDIST_CROSS_SIZE", whole_number(1), None,
            "set by the launcher for workers: number of machines with a worker of this local rank",
        ),
        Setting(
            "KVDIST_RESTARTS", whole_number(0), None,
            "set by the launcher: number of earlier starts of this process; unset the first time",
            "With `--on-worker-exit restart:N` that is the whole job. A worker that is started again while the others"
            " go on joins them ([reliability.md](reliability.md#newcomers)). A scheduler"
            " that is started again by hand needs `KVDIST_JOURNAL` instead",
        ),
        Setting(
            "KVDIST_LISTEN_FD", whole_number(0), None,
            "number of an inherited file descriptor: a listening socket, used instead of binding `DMLC_PS_ROOT_PORT`",
            "Set by the launcher for a scheduler, and for rank 0 of a job without servers",
        ),
    ),
    "Network and security": (
        Setting(
            "KVDIST_NODE_HOST", TEXT, None, "the address that a server binds and announces", twin="DMLC_NODE_HOST",
            shown_default="the address towards the scheduler",
        ),
        Setting(
            "KVDIST_INTERFACE", TEXT, None,
            "network interface of all hosts (`eth0`), or its network (`10.0.0.0/8`, `fd00::/8`)",
            "Its address on this machine is `DMLC_NODE_HOST` where that is not set (a loopback address only of a"
            " network that has no others). Of several it is an IPv4 one, unless `DMLC_PS_ROOT_URI` is an IPv6 address."
            " The scheduler listens at all addresses of its host name, or only at those of this interface if some are."
            " Linux only",
            twin="DMLC_INTERFACE",
        ),
        Setting(
            "KVDIST_SECRET_FILE", PATH, None,
            "a file with the secret of the job, at least 32 random bytes, the same for all processes",
            "Every connection is encrypted, and only processes with the secret are accepted. Every process needs its"
            " `KVDIST_RANK` then ([security.md](security.md))",
        ),
        Setting(
            "KVDIST_SECURITY", word("none", "curve"), None,
            "protection of traffic between hosts: `curve` encrypts it, `none` is plain TCP at any address",
            "`none` beside a secret is an error, and so is `curve` without one (`kvdist-launch` draws a secret)."
            " Without either, a job whose `DMLC_PS_ROOT_URI` is a loopback address uses files that only its user can"
            " reach, and other addresses are refused ([security.md](security.md))",
        ),
        Setting(
            "KVDIST_IO_THREADS", whole_number(1, 64), 1,
            "number of threads of a process that send, receive and encrypt bytes",
            "Each connection belongs to a single thread",
        ),
        Setting(
            "KVDIST_PORT_RANGE", PORT_RANGE, None, "ports on which processes listen, such as `20000-20100`",
            "Servers, and workers that listen for their host, take a free port of it. Without it the system chooses."
            " The scheduler's port is always `DMLC_PS_ROOT_PORT`",
        ),
    ),
    "Where keys live and how values travel": (
        Setting(
            "KVDIST_BIGARRAY_BOUND", whole_number(1), 1_000_000,
            "keys with at least this many elements are split over all servers; a smaller key is on a single server",
            "The scheduler's value counts", twin="MXNET_KVSTORE_BIGARRAY_BOUND",
        ),
        Setting(
            "KVDIST_UPDATE_ON_KVSTORE", FLAG, True,
            "`0`: with a `Trainer` without `update_on_kvstore`, the workers update the weights, not the store",
            twin="MXNET_UPDATE_ON_KVSTORE",
        ),
        Setting(
            "KVDIST_PLACEMENT", word("bytes", "hash"), "bytes",
            "`bytes` balances bytes over the servers; `hash` puts key k on server (k · 9973) mod S, as MXNet does",
            "The scheduler's value counts",
        ),
        Setting(
            "KVDIST_TRANSPORT", word("auto", "tcp"), "auto",
            "`auto`: processes of the same host and user exchange large values through shared memory, and ranks without"
            " servers sum in it; `tcp`: every byte goes through a TCP socket",
            "`tcp` on one machine needs a secret or `KVDIST_SECURITY=none` (`kvdist-launch` draws a secret). Each"
            " process has its own say; both must allow shared memory",
        ),
        Setting(
            "KVDIST_LOCAL_REDUCE", word("auto", "on", "off"), "auto",
            "which pushes the workers of a host sum in shared memory, so that a single push and a single answer cross"
            " the network for all of them",
            "`auto`: slices of 64 KiB and more that go to servers on other hosts; `on`: all pushes; `off`: none. Only"
            " keys of synchronous stores that are not halves, and only with more than one worker on the host and"
            " `KVDIST_TRANSPORT=auto`. Give every worker the same: one that says otherwise makes the others of its host"
            " wait",
        ),
    ),
    "When a process is lost": (
        Setting(
            "KVDIST_ON_LOSS", word("fail", "wait", "continue"), "fail",
            "reaction to the loss of a worker: `fail` ends the job, `wait` makes the other workers wait until it is"
            " started again, `continue` lets them go on without it",
            "`wait` and `continue` need stores that update ([reliability.md](reliability.md)); a lost server ends"
            " the job with all three, but for `KVDIST_REPLICAS=1`. The scheduler's value counts, and `kvdist-launch"
            " --on-loss` sets it",
        ),
        Setting(
            "KVDIST_MAX_WORKERS", whole_number(1), None,
            "largest number of workers, if workers join a running job with `KVDIST_ON_LOSS=continue`",
            "The scheduler's value counts. Give it to workers that join, too: their ranks are above the others'",
            shown_default="as many as there are at the start",
        ),
        Setting(
            "KVDIST_MIN_WORKERS", whole_number(1), None,
            "least number of workers for training; with fewer, training waits until enough are back",
            "With `KVDIST_ON_LOSS=continue`; `dist_async` is refused. Workers that have finished well count."
            " The scheduler's value counts, and `kvdist-launch --min-workers` sets it",
            shown_default="1",
        ),
        Setting(
            "KVDIST_RETURN_S", seconds(0), None,
            "seconds that a job waits for a worker to come back: with `KVDIST_ON_LOSS=wait` for each lost worker, with"
            " `continue` if all are lost; `0`: it ends at once",
            "The servers keep the weights meanwhile. The scheduler's value counts, and `kvdist-launch --restart` makes"
            " it 120",
            shown_default="600 with `KVDIST_ON_LOSS=wait`, else 0",
        ),
        Setting(
            "KVDIST_REPLICAS", whole_number(0), 0,
            "`1`: each server's slices have a copy on the next server, so that the death of a server loses nothing",
            "Needs `KVDIST_ON_LOSS=continue` and two servers or more, doubles servers' memory, and costs a pass over"
            " the gradients and a copy of their sum between servers"
            " ([reliability.md](reliability.md#servers-with-a-copy)). The same for all processes",
        ),
        Setting(
            "KVDIST_JOURNAL", PATH, None,
            "file into which the scheduler writes all that it hears, so that it can be started again after a kill",
            "A name without a slash lies in the folder of this user's sockets. `kvdist-launch --restart` chooses such a"
            " name; for a scheduler that is started by hand, name a file on a disk of its host, and another for each"
            " job. Unused where the loss of the scheduler ends the job (`KVDIST_SCHEDULER_AWAY_S`)"
            " ([reliability.md](reliability.md#a-scheduler-that-comes-back))",
        ),
        Setting(
            "KVDIST_SCHEDULER_AWAY_S", seconds(0), None,
            "seconds that servers and workers go on without a lost scheduler until it is started again; `0`: its loss"
            " ends the job",
            "The scheduler's value counts. It is started again by its journal (`KVDIST_JOURNAL`)"
            " ([reliability.md](reliability.md#a-scheduler-that-comes-back))",
            shown_default="60 with `KVDIST_ON_LOSS=continue`, else 0",
        ),
        Setting(
            "KVDIST_SNAPSHOTS", PATH, None,
            "folder for this job alone, into which servers write snapshots while training goes on",
            "When a server is lost and started again, all go back to the newest one; without it the loss of a server"
            " ends the job. A `dist_async` store is refused beside it: use `--replicas 1`. Needs"
            " `KVDIST_ON_LOSS=continue`, and every machine with a server or the scheduler must see this folder."
            " `kvdist-launch --snapshots` sets it"
            " ([reliability.md](reliability.md#servers-that-come-back))",
        ),
        Setting(
            "KVDIST_SNAPSHOT_INTERVAL_S", seconds(0), None,
            "seconds from a snapshot to the next",
            "The scheduler's value counts. Never less than a snapshot takes. Unless it is set, what costs least where a"
            " server is lost each hour: the root of 7200 s times what a snapshot takes",
            shown_default="by what a snapshot takes",
        ),
    ),
    "When workers exchange": (
        Setting(
            "KVDIST_PRIORITY_SLICES", FLAG, False,
            "`1`: every `dist` and `dist_async` store of this worker has [priority"
            " slices](performance.md#priority-slices), as the stores `p3` and `p3store_dist` always have",
            "Keys are cut small and little is on its way at once, so that what the next forward pass needs first"
            " overtakes. `0`: only those two. `DMLC_PS_VAN_TYPE=p3` is `1` where this is not set; any other van type"
            " changes nothing. Give every worker the same",
            derived=("DMLC_PS_VAN_TYPE", lambda text: "1" if text.lower() == "p3" else ""),
        ),
        Setting(
            "KVDIST_POLICY", POLICY, None,
            "when a `Trainer` on a `dist` store exchanges: `quota:SAMPLES`, with or without `,exact`, `,local_steps` or"
            " `,bits=8`;"
            " `local_sgd:STEPS` or `diloco:STEPS`, with or without `,LEARNING_RATE,MOMENTUM`,"
            " `,fragments=NUMBER`, `,delay=STEPS`, `,bits=8` or `,quorum=WORKERS`;"
            " `async:MAX_DELAY`; `sync` for gradients in each step",
            "After so many examples of all workers together ([training.md](training.md#machines-of-unequal-speed)),"
            " after so many steps that each worker makes of its own ([training.md](training.md#local-steps)), or by"
            " [other rules](training.md#other-policies). Unless it is set, gradients travel in each step. What a script"
            " gives to `kv.create` comes first. Give every worker the same; `kvdist-launch --policy` does",
            shown_default="gradients in each step",
        ),
    ),
    "What computes": (
        Setting(
            "KVDIST_KERNELS", word("auto", "numpy", "numba"), "auto",
            "library for the arithmetic of servers, of local stores, and of workers that update their weights",
            "`numpy`; `numba`, which is imported at once and waited for, an error if it is not installed; `auto` starts"
            " with NumPy and goes over to numba, if it is installed, when values of 4 MB have been worked on, without"
            " waiting for it. The results are equal bit by bit",
        ),
        Setting(
            "KVDIST_SERVER_DEVICE", DEVICES, ("cpu",),
            "device of the servers: `cpu`, `cuda:0`, or a list such as `cuda:0,cuda:1` that they take in turn",
            "`cuda:0` is the first GPU of the server's own host. Of a list, server r takes entry r modulo the number of"
            " entries (by its `KVDIST_RANK`, which it needs then). `kvdist-launch --server-device DEVICE` and `python"
            " -m kvdist --server-device DEVICE` do the same. A server whose GPU, driver or library is missing ends with"
            " a sentence before it joins; nothing falls back to the host. See"
            " [architecture.md](architecture.md#servers-on-gpus)",
        ),
        Setting(
            "KVDIST_GPU", word("auto", "host"), "auto",
            "where values that lie on GPUs are summed",
            "`auto`, there, if CuPy and numba-cuda are installed; `host` brings them to the host's memory"
            " ([gpu.md](gpu.md))",
        ),
    ),
    "Traces and dumps": (
        Setting(
            "KVDIST_PROFILER_AUTOSTART", FLAG, False,
            "`1`: workers and servers [trace themselves](output.md#traces) from their start",
            twin="MXNET_PROFILER_AUTOSTART",
        ),
        Setting(
            "KVDIST_PROFILE_DIR", PATH, None, "directory for traces whose file name has no directory",
            "A server writes them nowhere else", shown_default="where the process was started",
        ),
        Setting(
            "KVDIST_LEDGER", PATH, None,
            "folder into which each server writes the fate of every push",
            "For debugging: a line for each block and round. `kvdist ledger DIR --worker 3 --push 312` reads it"
            " ([reliability.md](reliability.md#the-ledger))",
        ),
        Setting(
            "KVDIST_DUMP", PATH, None,
            "folder for dumps: the last messages and answers of each process, written when the job fails or waits for"
            " long; `kvdist why FOLDER` explains them",
            "No values and no secrets are in a dump. `kvdist-launch --dump DIR` does the same. Where hosts share no"
            " folder, bring their dumps together. See [reliability.md](reliability.md#why-a-job-failed)",
        ),
        Setting(
            "KVDIST_DUMP_EVENTS", whole_number(1), 4096,
            "largest number of events in a dump",
            "`kvdist why --replay` needs all of a process, so take more for that",
        ),
    ),
    "Modules and checkpoints": (
        Setting(
            "KVDIST_SERVER_MODULE", MODULES, (),
            "a module with optimizers or handlers of commands of your own, which scheduler and servers import",
            "Several have commas between. See [handlers of commands](stores.md#commands-to-servers). `kvdist-launch"
            " --server-module NAME` and `python -m kvdist --server-module NAME` do the same. It must be importable on"
            " every machine",
        ),
        Setting(
            "KVDIST_OPTIMIZER_MODULE", MODULES, (),
            "the older name of `KVDIST_SERVER_MODULE`",
            "With `--optimizer-module NAME`, for a module that has optimizers alone",
        ),
        Setting(
            "KVDIST_CHECKPOINT_ROOT", ABSOLUTE_PATH, None,
            "absolute path of the folder below which scheduler and servers write and read"
            " [checkpoints](checkpoints.md), whatever path a worker names",
            "A container often starts in `/`, which allows everything",
            shown_default="the folder in which it was started",
        ),
    ),
    "Limits of memory and messages": (
        Setting(
            "KVDIST_SLICE_BYTES", whole_number(8), 4 * MIB,
            "largest piece in which a key is sent and updated; small values are joined up to this size",
            "No message between hosts has more bytes of values, except for one whole row: smaller slices help where"
            " connections break often, and cost throughput",
        ),
        Setting(
            "KVDIST_WINDOW_BYTES", whole_number(1), 64 * MIB,
            "bytes that a worker may have in flight to a server without an acknowledgement",
        ),
        Setting(
            "KVDIST_PRIORITY_SLICE_BYTES", whole_number(8), 160_000,
            "`KVDIST_SLICE_BYTES` of stores with priority slices; the scheduler's value counts",
            "`MXNET_KVSTORE_SLICE_THRESHOLD` gives it in elements of float32: 40,000 by default, as there",
            derived=("MXNET_KVSTORE_SLICE_THRESHOLD", _bytes_of_elements),
        ),
        Setting(
            "KVDIST_PRIORITY_WINDOW_BYTES", whole_number(1), 4 * MIB,
            "bytes that a worker with such a store may have in flight to all servers on other hosts together",
            "Urgent values wait behind no more than these. Too few leave the line idle: they should be what it carries"
            " in some 30 ms",
        ),
        Setting(
            "KVDIST_UNDER_WAY_BYTES", whole_number(1), 1024 * MIB,
            "bytes of a worker's pushes that are not counted yet, because a server or another worker is slower; a"
            " further `push` waits until there is room",
            "A wait of 10 s is explained like any other. Bytes are those of the values, also where they travel"
            " compressed. There is always room for two contributions to all keys (to a table of rows: for twice its"
            " largest push), so that the order in which workers push does not matter. It bounds a worker's memory, and"
            " each server keeps at most one contribution of each worker to a key",
        ),
        Setting(
            "KVDIST_SHARED_BYTES_MAX", whole_number(1), 1 << 40,
            "largest amount of shared memory of a process; further values are in ordinary memory and are sent",
            "Shared memory counts as memory of the process that made it",
        ),
        Setting(
            "KVDIST_FRAME_BYTES_MAX", whole_number(8), 64 * MIB, "the largest frame that a socket accepts or sends"
        ),
    ),
    "Waits": (
        Setting(
            "KVDIST_CONNECT_TIMEOUT_S", seconds(0, positive=True), 30.0,
            "seconds that a server or worker waits for the scheduler's first answer",
        ),
        Setting(
            "KVDIST_FORM_TIMEOUT_S", seconds(0, positive=True), 300.0, "seconds until the cluster must be complete"
        ),
        Setting(
            # Less would take an ordinary delay of a busy machine for a loss; more does not fit the options of sockets.
            "KVDIST_PATIENCE_S", seconds(1, 1_000_000), 10.0,
            "seconds of silence after which a process or its host counts as lost",
            "A shorter silence ends nothing, one of 1.5 times this and 0.5 s is a loss; `kvdist-launch --patience` sets"
            " it. See [patience](#patience)",
        ),
        Setting(
            "KVDIST_EXPLAIN_AFTER_S", seconds(0, positive=True), 10.0,
            "seconds after which a wait prints which process is awaited and for what; again at each multiple",
        ),
        Setting(
            "KVDIST_STALL_SHUTDOWN_S", seconds(0), 0.0,
            "seconds after which a waiting call raises and the job ends; `0` for never",
            "With servers: `DeadlineExceeded` says who is awaited and for what. It should be longer than the longest"
            " step, evaluation or checkpoint of any worker, and half of it bounds `KVDIST_EXPLAIN_AFTER_S`. Without"
            " servers: the operation raises on all ranks, and Horovod's variable is read where ours is not set",
            twin="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        ),
        Setting(
            "KVDIST_FAREWELL_S", seconds(0, positive=True), 5.0,
            "seconds that the scheduler waits for its servers to end, and a failing worker for its goodbye to arrive",
        ),
    ),
    "Without servers": (
        Setting(
            "KVDIST_START_TIMEOUT_S", seconds(0, positive=True), 30.0,
            "seconds until the ranks must have found each other; an error names the missing ranks",
            twin="HOROVOD_START_TIMEOUT",
        ),
        Setting(
            "KVDIST_STALL_CHECK_S", seconds(0), 10.0,
            "seconds after which a waiting operation is reported, on rank 0 and on the first rank that waits",
            "The report says who has not called it, on which host, and what it called last. Again whenever the wait has"
            " doubled. `0` for never, as `HOROVOD_STALL_CHECK_DISABLE=1`",
            twin="HOROVOD_STALL_CHECK_TIME_SECONDS",
        ),
        Setting(
            "KVDIST_TIMELINE", TIMELINE, "",
            "file into which rank 0 writes a timeline of its operations, for `chrome://tracing` and Perfetto",
            "Rank 1 writes beside it, to `timeline.rank1.json`, and so on. Horovod's word `DYNAMIC` begins none",
            twin="HOROVOD_TIMELINE",
        ),
        Setting(
            "KVDIST_TIMELINE_MARK_CYCLES", FLAG, False,
            "`1`: the timeline also marks the times at which no operation was pending",
            twin="HOROVOD_TIMELINE_MARK_CYCLES",
        ),
    ),
}  # fmt: skip
"""Section of docs/configuration.md → its settings."""

SETTINGS: dict[str, Setting] = {row.variable: row for rows in TABLE.values() for row in rows}
"""Our name of a variable → its setting."""

TWINS = {row.variable: row.twin for row in SETTINGS.values() if row.name == row.twin}
"""Our name of a variable → MXNet's."""

STALL_CHECK_DISABLE = Setting("HOROVOD_STALL_CHECK_DISABLE", FLAG, False, "no reports of stalled operations")

CLUSTER_VARIABLES = ("KVDIST_ROLE", "KVDIST_ROOT_URI", "KVDIST_ROOT_PORT", "KVDIST_NUM_WORKER", "KVDIST_NUM_SERVER")
"""What describes a cluster to a process; it needs all of them."""

HOROVOD_INTERFACE = Setting("HOROVOD_GLOO_IFACE", TEXT, None, "the network interface of all hosts")

LEVEL = word("trace", "debug", "info", "warning", "error", "fatal")
HOROVOD_LOG_LEVEL = Setting("HOROVOD_LOG_LEVEL", LEVEL, None, f"lowest level of log messages: {', '.join(LEVEL.words)}")
PYTHON_LEVELS = {"trace": "DEBUG", "fatal": "CRITICAL"}
"""Horovod's names of levels that have other names in Python."""

REPLACED_BY_PATIENCE = ("KVDIST_SILENCE_S", "KVDIST_RECONNECT_GRACE_S", "KVDIST_HEARTBEAT_S")
"""Variables of earlier versions that ``KVDIST_PATIENCE_S`` replaces."""


def with_twins(environ: Variables) -> dict[str, str]:
    """The variables, with our name added where only MXNet's is set."""
    return dict(environ) | {
        ours: environ[theirs] for ours, theirs in TWINS.items() if not environ.get(ours) and environ.get(theirs)
    }


def set_by(variable: str) -> dict[str, str]:
    """The metadata of a dataclass's field that a variable sets."""
    return {"variable": variable}


def setting(variable: str) -> Any:
    """A dataclass's field that a variable sets, with the default of the table."""
    return field(default=SETTINGS[variable].default, metadata=set_by(variable))


def rows_of(view: type) -> dict[str, Setting]:
    """The settings of a dataclass's fields, by the names of the fields."""
    return {each.name: SETTINGS[each.metadata["variable"]] for each in fields(view) if each.metadata}


def read_view(view: type[View], env: Variables, **known: Any) -> View:
    """A dataclass of settings with the values that variables set.

    Args:
        view: the dataclass.
        env: the variables.
        known: fields that are not read.

    Raises:
        ConfigError: a value is not valid.
    """
    values = {name: row.read(env) for name, row in rows_of(view).items() if name not in known}
    return view(**values, **known)


# Limits.

HEARTBEAT_S_MAX = 1.0
DIAL_S_MIN, DIAL_S_MAX = 0.5, 2.0
"""The kernel's attempts come after 1, 3, 7 s and later, so that a network that is back would be noticed too late; a
slow one needs some hundred milliseconds."""
REDIAL_S_MIN, REDIAL_S_MAX = 0.1, 2.0
RECONNECT_GRACE_S = 0.4
"""How long a connection that the peer's end closed may be away. A process that ends closes its connections at once, so
this is how soon its end is noticed."""
VERDICT_S = 0.9
"""How long after the patience a silent process counts as lost where the others go on without it: less than a second."""


@dataclass(frozen=True)
class Limits:
    """Bounds on memory, messages and waits; see the table for each. Every process of a job should have the same."""

    slice_bytes: int = setting("KVDIST_SLICE_BYTES")
    window_bytes: int = setting("KVDIST_WINDOW_BYTES")
    priority_slice_bytes: int = setting("KVDIST_PRIORITY_SLICE_BYTES")
    priority_window_bytes: int = setting("KVDIST_PRIORITY_WINDOW_BYTES")
    under_way_bytes: int = setting("KVDIST_UNDER_WAY_BYTES")
    shared_bytes_max: int = setting("KVDIST_SHARED_BYTES_MAX")
    frame_bytes_max: int = setting("KVDIST_FRAME_BYTES_MAX")
    connect_timeout_s: float = setting("KVDIST_CONNECT_TIMEOUT_S")
    form_timeout_s: float = setting("KVDIST_FORM_TIMEOUT_S")
    patience_s: float = setting("KVDIST_PATIENCE_S")
    explain_after_s: float = setting("KVDIST_EXPLAIN_AFTER_S")
    stall_shutdown_s: float = setting("KVDIST_STALL_SHUTDOWN_S")
    farewell_s: float = setting("KVDIST_FAREWELL_S")

    @property
    def heartbeat_s(self) -> float:
        """How often a process tells the scheduler its step, and a socket probes its peer."""
        return min(HEARTBEAT_S_MAX, self.patience_s / 8)

    @property
    def quiet_s(self) -> float:
        """A live peer's last bytes are younger than this."""
        return 2 * self.heartbeat_s

    @property
    def silence_s(self) -> float:
        """How long a connection to a live peer may bring nothing before it is closed and opened anew."""
        return 0.75 * self.patience_s

    @property
    def dial_s(self) -> float:
        """How long a dial waits for an answer."""
        return min(max(DIAL_S_MIN, self.patience_s / 8), DIAL_S_MAX)

    @property
    def redial_s(self) -> float:
        """The longest pause between two dials; the first is `REDIAL_S_MIN`, each is twice its predecessor."""
        return min(max(REDIAL_S_MIN, self.patience_s / 16), REDIAL_S_MAX)

    def reconnect_grace_s(self, after_silence: bool, goes_on: bool = False) -> float:
        """How long a broken connection may be away before its peer counts as lost.

        Args:
            after_silence: whether it had brought nothing for a while, and either end may have broken it for that. It
                gets the rest of the patience and three eighths more: where the network is back within the
                patience, the last word came up to a heartbeat before it went, and a dial and a pause are in vain.
            goes_on: whether the others go on without the peer, so that they must not wait for long, and a mistake
                costs a restart instead of the job. It gets the rest of the patience and `VERDICT_S`.
        """
        if not after_silence:
            return RECONNECT_GRACE_S
        return self.patience_s - self.silence_s + VERDICT_S if goes_on else RECONNECT_GRACE_S + 5 / 8 * self.patience_s


def refuse_replaced(env: Variables) -> None:
    """Refuse variables of earlier versions.

    Raises:
        ConfigError: such a variable is set.
    """
    for name in REPLACED_BY_PATIENCE:
        if env.get(name):
            raise ConfigError(
                f"{name} is {env[name]}, but this variable was replaced by KVDIST_PATIENCE_S (kvdist-launch"
                " --patience): how long a process or its host may be silent before it counts as lost, 10 s by default;"
                f" unset {name}"
            )


# Jobs with servers.

JOB_WIDE = (
    *("job", "bigarray_bound", "placement", "transport", "local_reduce", "on_loss", "max_workers", "snapshots"),
    *("min_workers", "replicas"),
)
"""Fields that a child process gets even with the default, so that its host's variables do not change them."""


@dataclass(frozen=True)
class ClusterConfig:
    """Who this process is, where the scheduler is, how large the cluster is, and how it behaves.

    Attributes:
        node_host: the address that a server binds and announces; None for the address towards the scheduler.
        job: messages of another job are refused, so two jobs cannot mix by a mistaken port.
        supervised: a launcher reports ended children on the scheduler's standard input.
        listen_fd: the inherited descriptor at which the scheduler listens already; child processes do not get it.

    Raises (on construction):
        ConfigError: a value is out of range, or contradicts another setting; the message names the variable.
    """

    role: Role = field(metadata=set_by("KVDIST_ROLE"))
    root_host: str = field(metadata=set_by("KVDIST_ROOT_URI"))
    root_port: int = field(metadata=set_by("KVDIST_ROOT_PORT"))
    num_workers: int = field(metadata=set_by("KVDIST_NUM_WORKER"))
    num_servers: int = field(metadata=set_by("KVDIST_NUM_SERVER"))
    rank: int | None = setting("KVDIST_RANK")
    node_host: str | None = setting("KVDIST_NODE_HOST")
    job: str = setting("KVDIST_JOB")
    security: str | None = setting("KVDIST_SECURITY")
    secret_file: str | None = setting("KVDIST_SECRET_FILE")
    bigarray_bound: int = setting("KVDIST_BIGARRAY_BOUND")
    placement: str = setting("KVDIST_PLACEMENT")
    transport: str = setting("KVDIST_TRANSPORT")
    local_reduce: str = setting("KVDIST_LOCAL_REDUCE")
    on_loss: str = setting("KVDIST_ON_LOSS")
    max_workers: int | None = setting("KVDIST_MAX_WORKERS")
    min_workers: int | None = setting("KVDIST_MIN_WORKERS")
    replicas: int = setting("KVDIST_REPLICAS")
    restarts: int | None = setting("KVDIST_RESTARTS")
    return_s: float | None = setting("KVDIST_RETURN_S")
    scheduler_away_s: float | None = setting("KVDIST_SCHEDULER_AWAY_S")
    journal: str | None = setting("KVDIST_JOURNAL")
    snapshots: str | None = setting("KVDIST_SNAPSHOTS")
    snapshot_interval_s: float | None = setting("KVDIST_SNAPSHOT_INTERVAL_S")
    supervised: bool = setting("KVDIST_SUPERVISED")
    port_range: tuple[int, int] | None = setting("KVDIST_PORT_RANGE")
    listen_fd: int | None = setting("KVDIST_LISTEN_FD")
    io_threads: int = setting("KVDIST_IO_THREADS")
    server_devices: tuple[str, ...] = setting("KVDIST_SERVER_DEVICE")
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, row in rows_of(ClusterConfig).items():
            if getattr(self, name) is not None:
                row.parse(row.kind.text(getattr(self, name)))
        if self.num_servers == 0:
            raise ConfigError(
                "this job has no servers (DMLC_NUM_SERVER is 0): use kv.create('collective'), or start it with servers"
                " by kvdist-launch -s 2 or kvdist_launch.run(..., servers=2)"
            )
        most = self.loss_policy.most_workers
        count = {Role.WORKER: most, Role.SERVER: self.num_servers, Role.SCHEDULER: 1}[self.role]
        if self.rank is not None and self.rank >= count:
            raise ConfigError(f"KVDIST_RANK is {self.rank}, but the cluster has only {count} {self.role}(s)")
        self.loss_policy.check()
        check_security(self.security, self.secret_file)
        if self.security == "curve" and self.secret_file is None:
            raise ConfigError(
                "KVDIST_SECURITY is 'curve', but no secret is set: set KVDIST_SECRET_FILE to a file with at least 32"
                " random bytes, the same for all processes of the job"
            )
        if self.is_local and self.transport == "tcp":
            raise ConfigError(
                "KVDIST_TRANSPORT is 'tcp', and every user of this machine can reach unencrypted TCP sockets: set"
                " KVDIST_SECRET_FILE (kvdist-launch draws a secret by itself), or KVDIST_SECURITY=none if you trust all"
                " users"
            )
        if self.local_reduce == "on" and self.transport == "tcp":
            raise ConfigError(
                "KVDIST_LOCAL_REDUCE is 'on', but the workers of a host sum in shared memory, and KVDIST_TRANSPORT is"
                " 'tcp'; change one of them"
            )

    @property
    def loss_policy(self) -> LossPolicy:
        """What follows when a process is lost."""
        names = {each.name for each in fields(self)} & {each.name for each in fields(LossPolicy)}
        return LossPolicy(**{name: getattr(self, name) for name in names})

    @property
    def is_local(self) -> bool:
        """Whether the sockets of this cluster are files of this machine that only its user can reach."""
        return self.secret_file is None and self.security is None and is_loopback(self.root_host)

    @property
    def encrypts(self) -> bool:
        """Whether every connection of this process is encrypted, and every peer asked for its key."""
        return self.secret_file is not None

    @property
    def job_tag(self) -> int:
        """The job's name in 32 bits, as every message carries it."""
        return zlib.crc32(self.job.encode())

    def server_device(self, rank: int | None) -> str:
        """Where the server of this rank sums and updates.

        Raises:
            ConfigError: servers take several devices in turn, and the rank is not known.
        """
        if rank is None and len(set(self.server_devices)) > 1:
            raise ConfigError(
                f"KVDIST_SERVER_DEVICE is {','.join(self.server_devices)!r}, which servers take in turn, but the rank"
                " of this server is not set: set KVDIST_RANK for each server, or name a single device"
            )
        return self.server_devices[(rank or 0) % len(self.server_devices)]

    def require_private(self, host: str) -> None:
        """Refuse to listen where other machines can reach us, unless that was asked for.

        Raises:
            ConfigError: `host` is not a loopback address, no secret is set, and ``KVDIST_SECURITY`` is not ``none``.
        """
        if self.encrypts or self.security == "none" or is_loopback(host):
            return
        raise ConfigError(
            f"{host} can be reached from other machines, and this job does not encrypt: anybody who reaches the port"
            " could read or change the model. Set KVDIST_SECRET_FILE, on every machine, to a file with the same 32 or"
            " more random bytes. Set KVDIST_SECURITY=none if the network is trusted, or use a loopback address"
        )

    def to_env(self) -> dict[str, str]:
        """The variables that describe this cluster to a child process."""
        env = {}
        for values in (self, self.limits):
            for name, row in rows_of(type(values)).items():
                value = getattr(values, name)
                if name != "listen_fd" and value is not None and (value != row.default or name in JOB_WIDE):
                    env[row.name] = row.kind.text(value)
        return env


def check_security(security: str | None, secret_file: str | None) -> None:
    """Refuse a secret beside ``KVDIST_SECURITY=none``.

    Raises:
        ConfigError: both are set.
    """
    if security == "none" and secret_file is not None:
        raise ConfigError(f"KVDIST_SECURITY is none, but KVDIST_SECRET_FILE is {secret_file!r}: unset one of them")


# Jobs without servers.


@dataclass(frozen=True, slots=True)
class CollectiveSettings:
    """The settings of a rank in a job without servers; see the table for each."""

    start_timeout_s: float = setting("KVDIST_START_TIMEOUT_S")
    stall_check_s: float = setting("KVDIST_STALL_CHECK_S")
    stall_shutdown_s: float = setting("KVDIST_STALL_SHUTDOWN_S")
    timeline: str = setting("KVDIST_TIMELINE")
    timeline_marks_cycles: bool = setting("KVDIST_TIMELINE_MARK_CYCLES")
    security: str | None = setting("KVDIST_SECURITY")
    secret_file: str | None = setting("KVDIST_SECRET_FILE")
    port_range: tuple[int, int] | None = setting("KVDIST_PORT_RANGE")
    interface: str | None = setting("KVDIST_INTERFACE")
    node_host: str | None = setting("KVDIST_NODE_HOST")
    patience_s: float = setting("KVDIST_PATIENCE_S")
    transport: str = setting("KVDIST_TRANSPORT")


# The tables of docs/configuration.md.

BEGIN, END = "<!-- settings: {} -->", "<!-- end of settings -->"


def with_tables(document: str) -> str:
    """A Markdown document with the present tables between its marks, ``<!-- settings: SECTION -->`` and its end."""
    for section, rows in TABLE.items():
        head, found, rest = document.partition(BEGIN.format(section) + "\n")
        if found:
            document = f"{head}{found}{_table(rows)}{END}{rest.partition(END)[2]}"
    return document


def _table(rows: tuple[Setting, ...]) -> str:
    lines = ["| variable | twin | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        other = (row.twin if row.name == row.variable else row.variable) if row.twin else ""
        meaning = row.sentence + (f". {row.details}" if row.details else "")
        lines.append(f"| `{row.name}` | {f'`{other}`' if other else ''} | {shown_default(row)} | {meaning} |")
    return "\n".join(lines) + "\n"


def shown_default(row: Setting) -> str:
    """The default of a setting in Markdown; '' without a default."""
    if row.shown_default or row.default in (None, "", ()):
        return row.shown_default
    text = f"`{row.kind.text(row.default)}`"
    for unit in ("TiB", "GiB", "MiB"):
        size = MIB << {"TiB": 20, "GiB": 10, "MiB": 0}[unit]
        if "_BYTES" in row.variable and row.default % size == 0:
            return f"{text} ({row.default // size} {unit})"
    return text
