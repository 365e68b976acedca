"""Settings: precedence, provenance, and errors that say what to do."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import settings
from dataplane.arena.slots import plan_slots
from dataplane.base import units
from dataplane.base.machine import (
    Machine,
    cpu_limit,
    memory_limit,
    this_machine,
)
from dataplane.base.trace import QUIET
from dataplane.model.errors import BudgetTooSmall, ConfigError

MIB, GIB = 1 << 20, 1 << 30
MACHINE = Machine(memory_bytes=64 << 30, cpu_count=12, uid=1000)
ENVIRON = {"HOME": "/nobody"}


def resolved(flags=None, environ=None, file=None, machine=MACHINE):
    return settings.resolve(flags or {}, ENVIRON | (environ or {}), file, machine)


def written(folder: Path, text: str) -> Path:
    path = folder / "dataplane.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("flag", "variable", "in_file"), list(itertools.product((True, False), repeat=3))
)
def test_the_first_of_flag_variable_file_and_default_counts(flag, variable, in_file, tmp_path):
    file = settings.read_file(written(tmp_path, 'slab_bytes = "3MiB"\n' if in_file else ""))
    found = resolved(
        flags={"slab_bytes": "1MiB"} if flag else {},
        environ={"DATAPLANE_SLAB_BYTES": "2MiB"} if variable else {},
        file=file,
    )["slab_bytes"]
    expected = [
        (flag, MIB, "--slab-bytes"),
        (variable, 2 * MIB, "$DATAPLANE_SLAB_BYTES"),
        (in_file, 3 * MIB, str(file.path)),
        (True, 16 * MIB, "default"),
    ]
    value, source = next((value, source) for given, value, source in expected if given)
    assert (found.value, found.source) == (value, source)


def test_an_empty_variable_says_nothing():
    assert resolved(environ={"DATAPLANE_SLAB_BYTES": ""})["slab_bytes"].source == "default"


def test_every_default_is_a_value_that_its_setting_may_have():
    for one in resolved().values():
        assert one.setting.kind.parse(one.value) == one.value


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ((4 << 20) + 5, 1 << 20),
        (4 << 30, 1 << 30),
        (8 << 30, 2 << 30),
        (24 << 30, 4 << 30),
        (64 << 30, 8 << 30),
        (1 << 40, 128 << 30),
    ],
)
def test_the_block_arena_is_a_share_of_memory(memory, expected):
    machine = Machine(memory_bytes=memory, cpu_count=2, uid=0)
    assert resolved(machine=machine)["block_arena_bytes"].value == expected


@pytest.mark.parametrize(
    ("memory", "delivery", "slab"),
    [(2 << 30, 64 * MIB, 4 * MIB), (8 << 30, 256 * MIB, 8 * MIB), (1 << 40, 1024 * MIB, 16 * MIB)],
)
def test_a_ranks_memory_follows_the_machines(memory, delivery, slab):
    found = resolved(machine=Machine(memory_bytes=memory, cpu_count=2, uid=0))
    assert found["delivery_bytes_per_rank"].value == delivery
    assert found["slab_bytes"].value == slab


@pytest.mark.parametrize(("cpus", "expected"), [(1, 1), (6, 6), (64, 8)])
def test_workers_follow_the_processors_up_to_eight(cpus, expected):
    machine = Machine(memory_bytes=1 << 30, cpu_count=cpus, uid=0)
    assert resolved(machine=machine)["worker_count"].value == expected


def test_a_number_of_workers_that_was_chosen_stays_and_another_may_grow():
    chosen = settings.node_config(resolved(flags={"worker_count": "3"}))
    assert (chosen.worker_count, chosen.worker_count_max) == (3, 0)
    assert settings.node_config(resolved()).worker_count_max == this_machine().cpu_count


def test_a_node_adds_only_as_many_workers_as_half_of_the_memory_holds(monkeypatch):
    machine = Machine(memory_bytes=64 << 30, cpu_count=64, uid=0)
    monkeypatch.setattr(settings, "this_machine", lambda: machine)
    config = settings.node_config(resolved(machine=machine))
    assert (config.worker_count, config.worker_count_most) == (8, 32)


@pytest.mark.parametrize(
    ("memory", "cpus", "expected"),
    [
        (24 << 30, 2, 1 << 30),
        (4 << 30, 4, 512 * MIB),
        (1 << 30, 8, 256 * MIB),
        (1 << 40, 99, 1 << 30),
    ],
)
def test_workers_together_take_half_of_the_memory_at_most_and_a_gib_each(memory, cpus, expected):
    machine = Machine(memory_bytes=memory, cpu_count=cpus, uid=0)
    assert resolved(machine=machine)["worker_memory_bytes"].value == expected


def test_a_limit_of_workers_that_was_chosen_does_not_grow_with_the_dataset():
    chosen = settings.node_config(resolved(flags={"worker_memory_bytes": "512MiB"}))
    assert (chosen.worker_memory_bytes, chosen.worker_memory_bytes_max) == (512 * MIB, 0)
    half = this_machine().memory_bytes // 2 // MIB * MIB
    assert settings.node_config(resolved()).worker_memory_bytes_max == half


def test_a_limit_that_no_worker_can_start_with_is_refused():
    with pytest.raises(BudgetTooSmall, match=r"worker_memory_bytes.*needs 268435456") as caught:
        settings.node_config(resolved(flags={"worker_memory_bytes": "64MiB"}))
    assert caught.value.needed == 256 * MIB


def test_folders_follow_the_xdg_variables_and_then_home():
    assert resolved()["cache_dir"].value == "/nobody/.cache/dataplane"
    assert resolved()["state_dir"].value == "/nobody/.local/state/dataplane"
    xdg = resolved(environ={"XDG_CACHE_HOME": "/c"})
    assert xdg["cache_dir"].value == "/c/dataplane"


def test_the_home_of_a_user_without_one_is_the_root_as_in_containers():
    machine = Machine(memory_bytes=1 << 30, cpu_count=1, uid=3_999_999_999)
    found = settings.resolve({}, {}, None, machine)
    assert found["cache_dir"].value == "/.cache/dataplane"
    assert found["state_dir"].value == "/.local/state/dataplane"
    folders = {"DATAPLANE_CACHE_DIR": "/c", "DATAPLANE_STATE_DIR": "/s"}
    assert settings.resolve({}, folders, None, machine)["cache_dir"].value == "/c"


def test_a_home_that_cannot_be_looked_into_has_no_configuration_file():
    assert settings.find_file(None, {"HOME": f"/{'x' * 300}"}) is None


def test_a_trainers_node_does_without_a_default_cache_folder_that_cannot_be_created(
    tmp_path, monkeypatch
):
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CACHE_HOME", "DATAPLANE_CACHE_DIR", "DATAPLANE_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    default = f"{home}/.cache/dataplane"
    assert settings.default_node_config().cache_dir == default
    home.write_text("no folder")
    assert settings.default_node_config().cache_dir == ""
    monkeypatch.setenv("DATAPLANE_CACHE_BYTES", "1MiB")  # blocks must be kept there
    assert settings.default_node_config().cache_dir == default
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", default)
    monkeypatch.delenv("DATAPLANE_CACHE_BYTES")
    assert settings.default_node_config().cache_dir == default


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("slab_byte = 3", "did you mean slab_bytes"),
        ("zzz = 3", "dataplane config show"),
        ('slab_bytes = "4 Mb/s"', "512MiB"),
        ("slab_bytes = true", "512MiB"),
        ("slab_bytes = [1]", "512MiB"),
        ("slab_bytes = 0", "512MiB"),
        ("slab_bytes = -1", "512MiB"),
        ("worker_count = 1.5", "whole number"),
        ('stall_timeout_s = "soon"', "30s"),
        ("stall_timeout_s = inf", "30s"),
        ("stall_timeout_s = 3e6", "up to 23 days"),
        ("stall_timeout_s = 0", "seconds above 0"),
        ('insecure = "perhaps"', "true or false"),
        ('listen = "7077"', "host:port"),
        ('listen = "a:99999"', "host:port"),
        ("slab_bytes = ", "not a TOML file"),
        ("[node]\nslab_bytes = 3", "no setting 'node'"),
    ],
)
def test_a_wrong_file_is_named_with_the_key_and_what_is_allowed(text, wanted, tmp_path):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        settings.read_file(path)
    assert str(path) in str(caught.value)
    assert wanted in str(caught.value)
    assert text.split()[0].strip("[]") in str(caught.value) or "TOML" in wanted


def test_a_wrong_variable_and_a_wrong_flag_are_named():
    with pytest.raises(ConfigError, match=r"\$DATAPLANE_FETCH_COUNT: .*'many'.*whole number"):
        resolved(environ={"DATAPLANE_FETCH_COUNT": "many"})
    with pytest.raises(ConfigError, match=r"--fetch-count: .*'0'"):
        resolved(flags={"fetch_count": "0"})


def test_the_file_that_is_named_first_is_the_one_that_counts(tmp_path):
    places = [tmp_path / name for name in ("named", "variable", "cwd", "user")]
    for count, place in enumerate(places, 1):
        place.mkdir()
        written(place, f"fetch_count = {count}")
    user = tmp_path / "user" / "dataplane"
    user.mkdir()
    written(tmp_path / "user", "fetch_count = 4").rename(user / "config.toml")
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "user")}
    variable = environ | {"DATAPLANE_CONFIG": str(places[1] / "dataplane.toml")}
    found = [
        settings.find_file(str(places[0] / "dataplane.toml"), variable, places[2]),
        settings.find_file(None, variable, places[2]),
        settings.find_file(None, environ, places[2]),
        settings.find_file(None, environ, tmp_path),
    ]
    assert [file.values["fetch_count"] for file in found if file] == [1, 2, 3, 4]
    assert settings.find_file(None, {"HOME": str(tmp_path)}, tmp_path) is None


@pytest.mark.parametrize(
    ("named", "environ"), [("/no/such", {}), (None, {"DATAPLANE_CONFIG": "/no/such"})]
)
def test_a_file_that_was_named_must_be_there(named, environ):
    with pytest.raises(ConfigError, match="there is no file /no/such"):
        settings.find_file(named, environ)


def test_the_node_has_what_the_settings_say():
    config = settings.node_config(
        resolved(
            flags={"join": "head:7077", "slab_bytes": "1MiB"}, environ={"XDG_CACHE_HOME": "/c"}
        )
    )
    assert (config.coordinator, config.slab_bytes, config.cache_dir, config.embedded) == (
        "head:7077",
        MIB,
        "/c/dataplane",
        False,
    )


def test_a_slab_that_no_rank_can_be_given_is_refused():
    with pytest.raises(BudgetTooSmall, match=r"slab_bytes \(--slab-bytes\).*\(default\)"):
        settings.node_config(resolved(flags={"slab_bytes": "1TiB"}))


@given(st.integers(1, 1 << 50), st.sampled_from(["slab_bytes", "delivery_bytes_per_rank"]))
def test_what_an_error_advises_to_set_is_enough_and_can_be_set(size, name):
    told = units.raise_to(name, size)
    setting = settings.BY_NAME[name]
    (flag,) = re.findall(rf"{setting.flag} (\w+)", told)
    assert size <= setting.kind.parse(flag) < size + max(MIB, size // 2)
    assert f"{setting.variable}={flag}" in told


def test_misspelt_variables_are_found():
    environ = {"DATAPLANE_SLAB_BITES": "1", "DATAPLANE_SLAB_BYTES": "1", "DATAPLANE_DEBUG": "1"}
    assert settings.unknown_variables(environ) == ["DATAPLANE_SLAB_BITES"]
    with pytest.raises(ConfigError, match="did you mean DATAPLANE_SLAB_BYTES"):
        settings.check_variables(environ)
    with pytest.raises(ConfigError, match=r"DATAPLANE_FOO .*: it limits nothing\."):
        settings.check_variables({"DATAPLANE_FOO": ""})


def test_variables_of_kubernetes_for_a_service_of_that_name_are_not_misspelt():
    port = "tcp://10.0.0.1:7077"
    settings.check_variables({
        "DATAPLANE_SERVICE_HOST": "10.0.0.1", "DATAPLANE_SERVICE_PORT": "7077",
        "DATAPLANE_SERVICE_PORT_GRPC": "7077", "DATAPLANE_PORT": port,
        "DATAPLANE_PORT_7077_TCP": port, "DATAPLANE_PORT_7077_TCP_ADDR": "10.0.0.1",
        "DATAPLANE_HEAD_SERVICE_HOST": "10.0.0.1", "DATAPLANE_HEAD_PORT": port,
    })  # fmt: skip


@given(st.integers(1, 1 << 60))
def test_a_size_reads_back_as_it_is_shown(size):
    assert units.BYTES.parse(units.show_bytes(size)) == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("1 kB", 1000), ("1KiB", 1024), ("1.5GiB", 3 << 29), ("2 TB", 2 * 10**12)],
)
def test_sizes_have_decimal_and_binary_units(text, size):
    assert units.BYTES.parse(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("500ms", 0.5), ("2min", 120), (3, 3)])
def test_durations_have_units(text, seconds):
    assert units.SECONDS.parse(text) == seconds


def test_a_trainer_reads_settings_without_heavy_imports():
    heavy = "{'torch', 'pyarrow', 'grpc', 'click', 'rich', 'numpy', 'fsspec'}"
    script = f"import sys, dataplane.settings; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_embedded_node_logs_less_than_a_served_one_by_default(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DATAPLANE_LOG_LEVEL", raising=False)
    assert settings.default_node_config().log_level == QUIET
    assert settings.BY_NAME["log_level"].default(this_machine(), {}) == "info"
    (tmp_path / "dataplane.toml").write_text('log_level = "info"\nlog_format = "json"\n')
    config = settings.default_node_config()
    assert (config.log_level, config.log_format) == ("info", "json")
    monkeypatch.setenv("DATAPLANE_LOG_LEVEL", "Debug")
    assert settings.default_node_config().log_level == "debug"
    monkeypatch.setenv("DATAPLANE_LOG_LEVEL", "chatty")
    with pytest.raises(ConfigError, match="debug, info, warning or error"):
        settings.default_node_config()


@pytest.mark.parametrize("room", [128 * 1024, MIB, 8 * MIB, 32 * MIB, 1024 * MIB])
def test_a_slabs_size_follows_the_memory_that_is_given_for_slabs(room):
    found = resolved(flags={"delivery_bytes_per_rank": str(room)})
    slab = found["slab_bytes"]
    assert slab.source == "default"
    assert slab.value == min(16 * MIB, room // 16)
    layout = plan_slots(room, slab.value)
    assert layout.arena_bytes <= room
    settings.node_config(found)


@pytest.mark.parametrize("slab", [4096, MIB, 64 * MIB])
def test_the_memory_for_slabs_follows_the_size_that_is_given(slab):
    found = resolved(environ={"DATAPLANE_SLAB_BYTES": str(slab)})
    room = found["delivery_bytes_per_rank"].value
    assert room == max(GIB, 8 * slab)
    assert plan_slots(room, slab).arena_bytes <= room
    settings.node_config(found)


def test_the_service_of_a_file_is_the_one_that_trainers_use(tmp_path, monkeypatch):
    written(tmp_path, 'service = "10.0.0.1:7077"')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATAPLANE_SERVICE", raising=False)
    assert settings.named_service() == "10.0.0.1:7077"
    monkeypatch.setenv("DATAPLANE_SERVICE", "localhost:1")
    assert settings.named_service() == "localhost:1"


def made(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_has_memory_and_a_processor():
    machine = this_machine()
    assert machine.memory_bytes > 1 << 20
    assert machine.cpu_count >= 1


def test_the_tightest_cgroup_counts(tmp_path):
    root = made(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": "1000000\n",
            "sys/fs/cgroup/pod/box/memory.max": "max\n",
            "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "250000 100000\n",
        },
    )
    assert memory_limit(root) == 1_000_000
    assert cpu_limit(root) == 2


def test_inside_a_container_the_mount_is_the_containers_own(tmp_path):
    root = made(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "sys/fs/cgroup/memory.max": "4096\n",
            "sys/fs/cgroup/cpu.max": "50000 100000\n",
        },
    )
    assert memory_limit(root) == 4096
    assert cpu_limit(root) == 1


def test_version_one_hierarchies_are_read(tmp_path):
    root = made(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "8192\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(root) == 8192
    assert cpu_limit(root) == 4


@pytest.mark.parametrize("text", ["", "0::/\n", "9:name=systemd:/\n"])
def test_without_cgroup_limits_there_is_no_limit(text, tmp_path):
    root = made(tmp_path, {"proc/self/cgroup": text})
    assert memory_limit(root) is None
    assert cpu_limit(root) is None
