"""Every setting: its name, allowed values, default, and where its value came from.

A setting has one name everywhere: `--slab-bytes` on a command line, DATAPLANE_SLAB_BYTES in the
environment, `slab_bytes` in a TOML file. The first of these that is set is used, otherwise a
default that is computed from the machine. The command line, and trainers that start their own node,
read settings only through this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from dataplane.arena.slots import arena_bytes_min, slot_bytes_of
from dataplane.base import trace, units
from dataplane.base.machine import Machine, may_create_in, pwd_home, this_machine
from dataplane.base.units import FILE_OR_NONE, SWITCH, WORDS, Setting, Value, fixed, raise_to
from dataplane.model.config import NodeConfig
from dataplane.model.errors import BudgetTooSmall, ConfigError
from dataplane.rpc.address import ADDRESS, ADDRESS_OR_NONE, DATA_ADDRESS, METRICS_ADDRESS

# -- security settings -------------------------------------------------------------------------
#
# The settings of dataplane/security, and of connections between nodes.
#
# These settings are defined here rather than in that room: every process reads its settings, but
# only processes that listen or connect over TCP import the code that uses these.

NEIGHBOUR_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "data_listen",
        DATA_ADDRESS,
        "the address at which a node of `dataplane serve` sends blocks to other nodes; if not set, "
        "a free port at the address from which the node reaches its coordinator. With TLS, a node "
        "opens this free port only if `peer_tls` or `insecure` is set",
        fixed(""),
    ),
    Setting(
        "peer_tls",
        SWITCH,
        "encrypt connections between nodes, with the files tls_cert, tls_key and tls_ca; set it on "
        "all nodes or on none",
        fixed(value=False),
    ),
)

SECURITY_SETTINGS: tuple[Setting, ...] = (
    Setting(
        "token_file",
        FILE_OR_NONE,
        "the file with the service's token; if not set, the file `token` in state_dir. If the "
        "variable DATAPLANE_TOKEN contains a token, no file is read",
        fixed(""),
    ),
    Setting(
        "tls_cert",
        FILE_OR_NONE,
        "the certificate of this process, followed by intermediate certificates, in PEM; needed by "
        "processes that listen with TLS",
        fixed(""),
    ),
    Setting("tls_key", FILE_OR_NONE, "the private key of tls_cert, in PEM", fixed("")),
    Setting(
        "tls_ca",
        FILE_OR_NONE,
        "the CA that signed the certificates of other processes, in PEM; a coordinator with this "
        "setting requires client certificates",
        fixed(""),
    ),
    Setting(
        "tls_peers",
        WORDS,
        "the URIs that certificates of other processes may have; a * at the end allows all URIs "
        "with this prefix; if not set, all certificates of tls_ca are allowed",
        fixed(""),
    ),
    Setting(
        "jwt_key",
        FILE_OR_NONE,
        "the public key, in PEM, with which a coordinator verifies JWTs signed with RS256 or ES256",
        fixed(""),
    ),
    Setting(
        "allowed_urls",
        WORDS,
        "prefixes of the urls that a node of `dataplane serve` may open, and that jobs of a "
        "coordinator may read; if not set, all urls",
        fixed(""),
    ),
    Setting(
        "allowed_functions",
        WORDS,
        "the functions for map= and collate= that a node of `dataplane serve` or a command may "
        'call: modules such as "mypackage.text:", and single functions; if not set, none',
        fixed(""),
    ),
    Setting(
        "insecure",
        SWITCH,
        "allow network connections without TLS; everybody who can read the network's traffic then "
        "learns the token",
        fixed(value=False),
    ),
)


CONFIG_VARIABLE = "DATAPLANE_CONFIG"
OTHER_VARIABLES = frozenset(
    {
        CONFIG_VARIABLE,
        *("DATAPLANE_DEBUG", "DATAPLANE_TOKEN", "DATAPLANE_WORKERS"),
        units.IMPORT_PATH_VARIABLE,
    }
)
# Other variables with this prefix: Kubernetes sets some in every pod beside a Service whose name
# begins with "dataplane", and our tests use some.
_OF_OTHERS = re.compile(
    r"DATAPLANE_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT(?:_\d+_(?:TCP|UDP|SCTP)\w*)?)|"
    r"DATAPLANE_TEST_\w+|DATAPLANE_FOREIGN"
)
MIB = 1 << 20
GIB = 1 << 30
WORKER_BYTES_MIN = 256 * MIB
"""The least memory that a worker needs. About 100 MiB are taken once the worker has imported all
modules that it may need.
"""


class Resolved(Struct, frozen=True):
    """One setting's value and its source: a flag, a variable, a file, or "default"."""

    setting: Setting
    value: Value
    source: str


class ConfigFile(Struct, frozen=True):
    """The checked settings of a TOML file."""

    path: Path
    values: Mapping[str, Value]


def _within(value: int, least: int, most: int) -> int:
    return max(least, min(value, most)) // MIB * MIB


def _worker_count(machine: Machine) -> int:
    return max(1, min(machine.cpu_count, 8))


def _folder(variable: str, below_home: str) -> Callable[[Machine, Mapping[str, str]], Value]:
    """Return a default: our folder inside an XDG base folder."""

    def default(machine: Machine, environ: Mapping[str, str]) -> str:
        if environ.get(variable):
            return str(Path(environ[variable], "dataplane").absolute())
        home = environ.get("HOME") or pwd_home(machine.uid) or "/"  # as container runtimes set it
        return str(Path(home, below_home, "dataplane").absolute())

    return default


SETTINGS: tuple[Setting, ...] = (
    Setting("listen", ADDRESS, "where the coordinator listens", fixed("127.0.0.1:7077")),
    Setting(
        "join",
        ADDRESS_OR_NONE,
        "the coordinator's address, for commands and for nodes that join a coordinator on another "
        "host",
        fixed(""),
    ),
    Setting(
        "service",
        ADDRESS_OR_NONE,
        "the coordinator's address, by which trainers also find the node of their host. If a "
        "node's `join` or `listen` spells this address in another way than trainers do, set the "
        "trainers' spelling as the node's `service`",
        fixed(""),
    ),
    Setting(
        "metrics_listen",
        METRICS_ADDRESS,
        "the port of `dataplane serve` for Prometheus and for its page in a browser; requests need "
        "the token; if not set, there is no such port",
        fixed(""),
    ),
    *NEIGHBOUR_SETTINGS,
    *SECURITY_SETTINGS,
    Setting(
        "state_dir",
        units.FOLDER,
        "where the coordinator keeps its database, its token, and the secret for nodes' keys",
        _folder("XDG_STATE_HOME", ".local/state"),
    ),
    Setting(
        "cache_dir",
        units.FOLDER,
        "where a node keeps manifests and, if `cache_bytes` is set, blocks",
        _folder("XDG_CACHE_HOME", ".cache"),
    ),
    Setting(
        "cache_bytes",
        units.BYTES_OR_NONE,
        "disk space in `cache_dir` for blocks of remote shards, per node; blocks outlive restarts",
        fixed(0),
    ),
    Setting(
        "block_arena_bytes",
        units.BYTES,
        "memory for fetched and decoded blocks, per node",
        # An eighth of the memory suffices for the blocks that a shuffle keeps open; small machines
        # may use a quarter.
        lambda m, _: _within(m.memory_bytes // 8, min(m.memory_bytes // 4, 4 * GIB), 1 << 62),
    ),
    Setting(
        "delivery_bytes_per_rank",
        units.BYTES,
        "memory for finished batches, per rank of a job",
        # Eight ranks may take a quarter of the machine, but do so only if batches are large and
        # trainers wait: a slot is allocated when it is first used.
        lambda machine, _environ: _within(machine.memory_bytes // 32, 64 * MIB, GIB),
    ),
    Setting(
        "slab_bytes",
        units.BYTES,
        "size of a slab, the piece of memory with a few batches that a trainer gets at a time",
        # Up to 16 MiB, larger slabs reduce the cost per batch.
        lambda machine, _environ: _within(machine.memory_bytes // 1024, 4 * MIB, 16 * MIB),
    ),
    Setting(
        "worker_count",
        units.COUNT_OR_NONE,
        "number of worker processes of a node, which decode blocks and make batches; if not set, "
        "the node begins with one for each processor (at most 8), and while a trainer waits, it "
        "adds workers until each processor has one; with 0, other nodes make all batches",
        lambda machine, _environ: _worker_count(machine),
    ),
    Setting(
        "worker_memory_bytes",
        units.BYTES,
        "private memory that each worker process may use; if not set, the node allows more for "
        "datasets with large blocks",
        # All workers together take at most half of the machine.
        lambda machine, _environ: _within(
            machine.memory_bytes // (2 * _worker_count(machine)), WORKER_BYTES_MIN, GIB
        ),
    ),
    Setting(
        "fetch_count",
        units.COUNT,
        "initial number of parallel reads from object storage, per node; the node adds reads as "
        "long as a trainer waits and each addition raises the throughput",
        fixed(16),
    ),
    Setting(
        "fetch_timeout_s",
        units.SECONDS,
        "time limit of one read from object storage, after which the node repeats the read",
        fixed(30.0),
    ),
    Setting(
        "stall_timeout_s",
        units.SECONDS,
        "how long a rank waits for a batch before it raises an error with the reason",
        fixed(120.0),
    ),
    Setting(
        "lease_s",
        units.SECONDS,
        "a rank counts as lost after this time without a sign of life",
        fixed(30.0),
    ),
    Setting(
        "linger_s",
        units.SECONDS,
        "how long a node that a trainer started keeps running after its last trainer has exited",
        fixed(2.0),
    ),
    Setting(
        "log_level",
        units.choice(*trace.LEVELS, metavar="LEVEL"),
        "lowest level of logged lines; if not set, a node that a trainer started logs warnings and "
        "errors",
        fixed("info"),
    ),
    Setting(
        "log_format",
        units.choice(*trace.FORMATS, metavar="FORM"),
        "format of log lines: plain text, or one JSON object per line",
        fixed("text"),
    ),
)

BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


def resolve(
    flags: Mapping[str, str | bool],
    environ: Mapping[str, str],
    file: ConfigFile | None,
    machine: Machine,
) -> dict[str, Resolved]:
    """Resolve every setting: flag, environment, file, default.

    Raises:  ConfigError: a flag or variable has a value that is not allowed.
    """
    found = {}
    for setting in SETTINGS:
        value: Value
        if setting.name in flags:
            value, source = parse(setting, flags[setting.name], setting.flag), setting.flag
        elif environ.get(setting.variable):
            source = f"${setting.variable}"
            value = parse(setting, environ[setting.variable], source)
        elif file is not None and setting.name in file.values:
            value, source = file.values[setting.name], str(file.path)
        else:
            value, source = setting.default(machine, environ), "default"
        found[setting.name] = Resolved(setting, value, source)
    return _with_slabs_that_fit(found, machine)


def _with_slabs_that_fit(found: dict[str, Resolved], machine: Machine) -> dict[str, Resolved]:
    """If only one of slab size and a rank's memory for slabs is set, adapt the other: a default
    that is computed from the machine must not make a value chosen by the user invalid.
    """
    slab, delivery = found["slab_bytes"], found["delivery_bytes_per_rank"]
    size, room = int(str(slab.value)), int(str(delivery.value))
    if slab.source == "default":
        found["slab_bytes"] = structs.replace(slab, value=min(size, slot_bytes_of(room)))
    elif delivery.source == "default" and arena_bytes_min(size) <= machine.memory_bytes // 8:
        room = max(room, arena_bytes_min(size))
        found["delivery_bytes_per_rank"] = structs.replace(delivery, value=room)
    return found


def parse(setting: Setting, given: object, where: str) -> Value:
    """Parse a value; an error names its source and the allowed values.

    Raises:  ConfigError: key, found, allowed.
    """
    try:
        return setting.kind.parse(given)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {setting.name} cannot be {given!r}; allowed: {setting.kind.allowed}",
            key=setting.name,
            found=str(given),
            allowed=setting.kind.allowed,
        ) from error


def find_file(
    named: str | None, environ: Mapping[str, str], folder: Path | None = None
) -> ConfigFile | None:
    """Return the first of: the file given on the command line, the one in DATAPLANE_CONFIG,
    ./dataplane.toml, and config.toml in the user's configuration folder. A file that was named must
    exist.

    Raises:  ConfigError: no such file, not TOML, an unknown key, a bad value; file, key, allowed.
    """
    for path, source in ((named, "--config"), (environ.get(CONFIG_VARIABLE), CONFIG_VARIABLE)):
        if path:
            if not Path(path).exists() or Path(path).is_dir():
                raise ConfigError(f"{source}: there is no file {path}", file=path)
            return read_file(Path(path))
    candidates = [(folder or Path.cwd()) / "dataplane.toml"]
    if environ.get("XDG_CONFIG_HOME"):
        candidates.append(Path(environ["XDG_CONFIG_HOME"], "dataplane", "config.toml"))
    elif environ.get("HOME"):
        candidates.append(Path(environ["HOME"], ".config", "dataplane", "config.toml"))
    # Unlike `Path.is_file`, this is false in the home of another user.
    return next((read_file(path) for path in candidates if os.path.isfile(path)), None)  # noqa: PTH113


def read_file(path: Path) -> ConfigFile:
    """Read a TOML file of settings.

    Raises:  ConfigError: not readable, not TOML, an unknown key, a bad value; file, key, allowed.
    """
    import tomllib

    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}", file=str(path)) from error
    values = {}
    for key, given in table.items():
        if key not in BY_NAME:
            import difflib

            near = difflib.get_close_matches(key, BY_NAME, n=1)
            advice = f"did you mean {near[0]}?" if near else "`dataplane config show` lists them"
            raise ConfigError(
                f"{path}: there is no setting {key!r}; {advice}",
                file=str(path),
                key=key,
                allowed=", ".join(BY_NAME),
            )
        values[key] = parse(BY_NAME[key], given, str(path))
    return ConfigFile(path, values)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the DATAPLANE_* variables that nothing reads, which are most likely misspelt."""
    known = _known_variables()
    return sorted(
        name
        for name in environ
        if name.startswith(units.PREFIX) and name not in known and not _OF_OTHERS.fullmatch(name)
    )


def check_variables(environ: Mapping[str, str]) -> None:
    """Refuse unknown variables that look like settings: a misspelt one would have no effect, even
    if it was meant to limit what a service opens.

    Raises:  ConfigError: a variable is unknown; suggests the setting that may be meant.
    """
    for name in unknown_variables(environ):
        import difflib

        known = [known_variable.removeprefix(units.PREFIX) for known_variable in _known_variables()]
        near = difflib.get_close_matches(name.removeprefix(units.PREFIX), known, n=1)
        meant = f"did you mean {units.PREFIX}{near[0]}?" if near else "it limits nothing."
        raise ConfigError(
            f"{name} is set in the environment, and there is no such setting: {meant} Correct it, "
            "or unset it; `dataplane config show` lists all",
            key=name,
        )


def _known_variables() -> frozenset[str]:
    return OTHER_VARIABLES.union(setting.variable for setting in SETTINGS)


def node_config(settings: Mapping[str, Resolved]) -> NodeConfig:
    """Return the node's part of the settings, without the name of its socket, which is derived from
    the service or from the run that starts the node.

    Raises:  BudgetTooSmall: no slab fits into a rank's delivery memory, or a worker could not even
    start; needed, budget.
    """
    values = {name: resolved.value for name, resolved in settings.items()}
    chosen: dict[str, Any] = {
        name: values[name] for name in NodeConfig.__struct_fields__ if name in values
    }
    machine = this_machine()
    half = machine.memory_bytes // 2 // MIB * MIB
    is_chosen = {name: found.source != "default" for name, found in settings.items()}
    config = NodeConfig(
        **chosen,
        coordinator=str(values["join"]),
        worker_count_max=(
            0
            if is_chosen["worker_count"]
            else min(machine.cpu_count, half // chosen["worker_memory_bytes"])
        ),
        worker_memory_bytes_max=0 if is_chosen["worker_memory_bytes"] else half,
    )
    if config.worker_memory_bytes < WORKER_BYTES_MIN:
        raise BudgetTooSmall(
            f"worker_memory_bytes ({settings['worker_memory_bytes'].source}) is "
            f"{config.worker_memory_bytes} bytes, and a worker needs {WORKER_BYTES_MIN} to start "
            f"and to decode small blocks: {raise_to('worker_memory_bytes', WORKER_BYTES_MIN)}",
            needed=WORKER_BYTES_MIN,
            budget=config.worker_memory_bytes,
        )
    if config.slab_bytes > config.delivery_bytes_per_rank:
        raise BudgetTooSmall(
            f"slab_bytes ({settings['slab_bytes'].source}) is larger than "
            f"delivery_bytes_per_rank ({settings['delivery_bytes_per_rank'].source}): "
            f"{config.slab_bytes} > {config.delivery_bytes_per_rank} bytes. Leave one of them "
            f"out, and it is adapted to the other; or "
            + raise_to("delivery_bytes_per_rank", arena_bytes_min(config.slab_bytes)),
            needed=config.slab_bytes,
            budget=config.delivery_bytes_per_rank,
        )
    return config


def default_node_config() -> NodeConfig:
    """Configure a node from the environment, the configuration file and this machine: the node that
    a trainer without `service=` starts. Its `cache_dir` is "" if the default one cannot be created:
    a node can do without all that it keeps there, except blocks of `cache_bytes`.

    Raises:  ConfigError: a variable or the file is wrong; says which, and what is allowed.
    """
    settings = _of_process()
    config = node_config(settings)
    if not config.has_workers:
        raise ConfigError(
            f"worker_count ({settings['worker_count'].source}) is 0, but a trainer's own node has "
            "no other nodes to make its slabs: leave worker_count out, or start `dataplane serve` "
            "and pass service=",
            field="worker_count",
        )
    if settings["cache_dir"].source == "default" and not config.cache_bytes:
        folder = config.cache_dir
        if not (os.path.isdir(folder) or may_create_in(folder)):  # noqa: PTH112 - Path's may raise
            config = structs.replace(config, cache_dir="")
    if settings["log_level"].source == "default":
        # An embedded node logs to the trainer's stderr, so it logs only lines on which the user can
        # act.
        config = structs.replace(config, log_level=trace.QUIET)
    return config


def stall_timeout_s() -> float:
    """Return how long a trainer waits, from the environment and the configuration file.

    Raises:  ConfigError: a variable or the file is wrong; says which, and what is allowed.
    """
    return float(str(_of_process()["stall_timeout_s"].value))


def cache_dir() -> str:
    """Return the folder for this user's caches, from the environment and the configuration file.

    Raises:  ConfigError: a variable or the file is wrong; says which, and what is allowed.
    """
    return str(_of_process()["cache_dir"].value)


def named_service() -> str:
    """Return the service that trainers use, from the environment and the configuration file; "" if
    neither names one.

    Raises:  ConfigError: a variable or the file is wrong; says which, and what is allowed.
    """
    return str(_of_process()["service"].value)


def _of_process() -> dict[str, Resolved]:
    return resolve({}, os.environ, find_file(None, os.environ), this_machine())
