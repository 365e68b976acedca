"""Which urls a served node opens: after links, redirects and names, and before any byte is read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from signed_server import signed_server

from dataplane.index.indexing import index_dataset
from dataplane.model.config import NodeConfig
from dataplane.model.errors import (
    ConfigError,
    DataplaneError,
    DatasetChangedError,
    ShardNotFound,
    StoreDenied,
)
from dataplane.model.records import View
from dataplane.node.manifests import ManifestSources, policy_of
from dataplane.node.own_reads import check_allowed
from dataplane.rpc.bounds import check_name
from dataplane.rpc.codec import encode
from dataplane.rpc.messages import DatasetSource
from dataplane.security.urls import is_under
from dataplane.settings import default_node_config
from dataplane.store.connect import Stores, open_store
from dataplane.store.reads import EndedEarlyError, Race, fill, raced
from dataplane.store.url_policy import UrlPolicy, is_of_machine
from dataplane.store.urls import normalise
from dataplane.transforms.functions import function_name
from dataplane.worker.functions import loaded


@pytest.mark.parametrize(
    ("url", "prefix", "expected"),
    [
        ("s3://b/train/x", "s3://b/train", True),
        ("s3://b/train", "s3://b/train", True),
        ("s3://b/train", "s3://b/train/", True),
        ("s3://b/train/", "s3://b/train/", True),
        ("s3://b/train-2/x", "s3://b/train", False),
        ("s3://b/train*/x", "s3://b/train", False),
        ("s3://b/train/*", "s3://b/train", True),
        ("s3://b/{train,test}/x", "s3://b/train", False),
        ("s3://b/train/{a,../b}", "s3://b/train", False),
        ("s3://b/train/../x", "s3://b/train", False),
        ("https://h/a/%2e%2E/x", "https://h/a/", False),
        ("https://h/a\\..\\x", "https://h/a", False),
        ("https://h/a/x?y=/../", "https://h/a", True),
        ("https://h.evil/a", "https://h", False),
        ("http://[fd00::1]:80/a/x*", "http://[fd00::1]:80/a", True),
        ("s3://b/train/a?/../../x", "s3://b/train", False),
        ("s3://b/train/a..b/.c/x", "s3://b/train", True),
        ("https://h@evil/a", "https://h", False),
        ("https://h:81/a", "https://h", False),
        ("file:///etc/passwd", "file:///data", False),
        ("http://h/a/x", "https://h/a", False),
    ],
)
def test_a_prefix_contains_what_lies_below_it(url, prefix, expected):
    assert is_under(url, [prefix]) is expected


@given(st.text("ab/.*{},%2e", max_size=12), st.text("ab/", max_size=4))
def test_whatever_is_allowed_begins_with_the_prefix(tail, prefix):
    prefix = f"s3://b/{prefix}"
    if is_under(prefix + tail, [prefix]):
        assert ".." not in (prefix + tail).replace("{", "/").replace(",", "/").split("/")
    assert not is_under(f"s3://c/{tail}", [prefix])


@pytest.mark.parametrize(
    "address",
    [
        *("169.254.169.254", "169.254.170.2", "fe80::1%eth0", "::ffff:169.254.169.254"),
        *("64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fd00:ec2::254", "100.100.100.200"),
        *("0.0.0.0", "::"),
    ],
)
def test_addresses_of_the_machine_are_known_in_every_form(address):
    assert is_of_machine(address)
    with pytest.raises(StoreDenied, match="link-local"):
        UrlPolicy().check_address("http://h/x", address)


@pytest.mark.parametrize(
    "url",
    [
        "webhdfs://169.254.169.254/x",
        "sftp://me@169.254.169.254:22/x",
        "https://[fd00:ec2::254]/latest",
        "http://169.254.169.254:80/latest/*",
    ],
)
def test_no_scheme_reaches_such_an_address(url):
    with pytest.raises(StoreDenied, match="link-local"):
        UrlPolicy().check_names([url])
    with pytest.raises(StoreDenied, match="link-local"):
        UrlPolicy().check_all(["file:///a", url][1:])
    UrlPolicy().check_names(["s3://bucket/x", "s3://10.20/x", "http://a.b:1/x", "file:///a"])


WRITTEN = (
    *("2852039166", "0xa9fea9fe", "0XA9FEA9FE", "025177524776", "169.254.43518", "169.16689662"),
    *("0251.0376.0251.0376", "0xa9.0xfe.0xa9.0xfe", "169.254.169.0xfe", "169.254.169.254."),
    *("2852039166.", "169%2e254.169.254", "\uff11\uff16\uff19.254.169.254", "169\u3002254.169.254"),
    *("me@2852039166", "me:word@0xa9fea9fe:21", "[::ffff:169.254.169.254]", "0", "0x0"),
)


@pytest.mark.parametrize("host", WRITTEN)
@pytest.mark.parametrize("scheme", ["ftp", "sftp", "webhdfs", "smb", "http"])
def test_no_way_to_write_such_an_address_passes(scheme, host):
    for rest in ("/latest/x", "?x=1", "#x", "\\x", ""):
        with pytest.raises(StoreDenied, match="link-local"):
            UrlPolicy().check(f"{scheme}://{host}{rest}")
    with pytest.raises(StoreDenied, match="link-local"):
        UrlPolicy().check_names([f"{scheme}://{host}/x"])


def test_hosts_that_only_look_like_such_an_address_are_allowed():
    names = ("2852039166.example", "0xcafe.be", "a9fea9fe", "169.254.169.254.5", "08.8.8.8")
    UrlPolicy().check_names([f"ftp://{one}/x" for one in (*names, "134744072", "0177.1", "10.1.")])
    UrlPolicy().check_names([f"{scheme}://2852039166/x" for scheme in ("s3", "gs", "az")])


def test_a_prefix_lists_an_address_however_it_is_written():
    UrlPolicy(("ftp://2852039166/data",)).check("ftp://2852039166/data/x")
    listed = UrlPolicy(("http://0xa9.254.10.1:9000/",))
    listed.check_address("http://0xa9.254.10.1:9000/x", "169.254.10.1")
    with pytest.raises(StoreDenied):
        listed.check_address("http://0xa9.254.10.1:9000/x", "169.254.169.254")


def test_other_addresses_and_those_that_are_listed_are_allowed():
    for address in ("10.0.0.1", "127.0.0.1", "93.184.216.34", "2606:2800::1"):
        UrlPolicy().check_address("http://h/x", address)
    listed = UrlPolicy(("http://169.254.10.1:9000/data", "https://h/"))
    listed.check_address("http://169.254.10.1:9000/data/x", "169.254.10.1")
    with pytest.raises(StoreDenied):
        listed.check_address("https://h/x", "169.254.169.254")


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Opens datasets as a served node does that may read only `tmp_path`/data."""
    monkeypatch.setenv("DATAPLANE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "data" / "a.parquet")
    config = structs.replace(default_node_config(), allowed_urls=str(tmp_path / "data"))
    stores = Stores(1.0, policy=policy_of(config))
    yield lambda *urls, form="": ManifestSources(config, stores, lambda *_: None).open(
        DatasetSource(urls, form), View(), None
    )
    stores.close()


def denied(node, *urls, form=""):
    with pytest.raises(StoreDenied) as caught:
        node(*urls, form=form)
    text = str(caught.value)
    assert "allowed_urls" in text
    assert "found bytes" not in text
    assert "root:" not in text
    return text


def test_a_served_node_opens_what_is_allowed(node, tmp_path):
    assert node(f"{tmp_path}/data/*.parquet").sample_count == 3
    assert node(f"file://{tmp_path}/data/").sample_count == 3


def test_the_folder_above_what_is_allowed_is_not_asked_whether_it_is_a_table(
    node, tmp_path, caplog
):
    log = tmp_path / "_delta_log" / "00000000000000000000.json"
    log.parent.mkdir()
    log.write_text("{}")
    assert node(f"{tmp_path}/data").sample_count == 3
    assert "url refused" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "/etc/passwd",
        "{data}/../../../../../../../../etc/passwd",
        "{data}-2/a.parquet",
        "s3://bucket/x.parquet",
        "http://169.254.169.254/latest/meta-data/",
        "{data}/{{a,../b}}.parquet",
    ],
)
def test_nothing_else_is_opened_and_no_byte_of_it_shown(node, tmp_path, url, caplog):
    denied(node, url.format(data=tmp_path / "data"), form="jsonl")
    (line,) = [one.getMessage() for one in caplog.records if "url refused" in one.message]
    assert "allowed_urls" in line
    caplog.clear()


def test_links_count_as_where_they_lead(node, tmp_path):
    data, outside = tmp_path / "data", tmp_path / "outside"
    outside.mkdir()
    pq.write_table(pa.table({"x": [1]}), outside / "b.parquet")
    (data / "link.parquet").symlink_to("/etc/passwd")
    assert "leads out of" in denied(node, str(data / "link.parquet"))
    assert "leads out of" in denied(node, f"{data}/*.parquet")
    (data / "link.parquet").unlink()
    (data / "folder").symlink_to(outside)
    assert "leads out of" in denied(node, str(data / "folder" / "b.parquet"))
    assert "leads out of" in denied(node, str(data))
    (data / "folder").unlink()
    (data / "within.parquet").symlink_to(data / "a.parquet")
    assert node(str(data / "within.parquet")).sample_count == 3


def test_a_manifest_in_an_allowed_folder_opens_no_shards_elsewhere(node, tmp_path):
    outside = tmp_path / "b.parquet"
    pq.write_table(pa.table({"x": [1]}), outside)
    saved = tmp_path / "data" / "b.manifest"
    saved.write_bytes(index_dataset(str(outside)).to_bytes())
    assert "b.parquet is not below" in denied(node, str(saved))


def test_an_embedded_node_opens_what_its_trainer_could(monkeypatch, tmp_path):
    config = structs.replace(default_node_config(), embedded=True, allowed_urls=str(tmp_path))
    assert policy_of(config) is None


def test_an_http_store_that_checks_reads_the_same_as_any_other():
    body = os.urandom(100_000)
    with signed_server() as server:
        url = server.add("/a%20b.bin?signature=x", body)
        stores = Stores(1.0, policy=UrlPolicy())
        store, usual = stores.connect(url), open_store("/".join(url.split("/", 3)[:3]))
        found = store.head(url)
        assert found == usual.head(url)
        assert bytes(store.read(url, 10, 70_000, found.etag)) == body[10:70_010]
        assert b"".join(map(bytes, store.stream(url, found.etag))) == body
        into = memoryview(bytearray(500))
        for each in (store, store._inner):  # with retries, and without
            fill(each, url, 99_500, found.etag, into[:200], into[200:])
            assert into == body[99_500:]
        with pytest.raises(DatasetChangedError):
            store.read(url, 0, 10, '"another"')
        with pytest.raises((ShardNotFound, StoreDenied)):
            store.head(f"{server.endpoint}/nothing")
        stores.close()
        del stores, store, usual  # and their connections


def test_a_read_over_http_that_is_overtaken_ends_and_writes_no_more():
    head = (
        b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-99/100\r\nETag: x\r\nContent-Length: 100\r\n\r\n"
    )
    race, ended = Race(), []
    into = bytearray(100)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a"
        stores = Stores(30.0, policy=UrlPolicy())

        def read():
            with raced(race), pytest.raises(EndedEarlyError):
                stores.connect(url).read_into(url, 0, "x", memoryview(into))
            ended.append(bytes(into))

        thread = threading.Thread(target=read)
        thread.start()
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(head + b"y" * 50)
            deadline = time.monotonic() + 60
            while into[:50] != b"y" * 50:
                assert time.monotonic() < deadline
                threading.Event().wait(0.01)
            assert race.overtake(60)
            thread.join(60)
        stores.close()
    assert ended == [b"y" * 50 + bytes(50)]


ISOLATED = """
import http.server, json, socket, sys, threading
from dataplane.model.errors import StoreDenied
from dataplane.store.connect import Stores
from dataplane.store.reads import EndedEarlyError, Race, raced
from dataplane.store.url_policy import UrlPolicy

asked = []

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked.append(self.path)
        self.send_response(302 if self.path == "/redirect" else 206)
        self.send_header("Location", "http://169.254.169.254:%d/secret" % metadata.server_port)
        self.send_header("Content-Range", "bytes 0-0/4")
        self.send_header("ETag", '"x"')
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"s")
    def log_message(self, *_): pass

metadata = http.server.ThreadingHTTPServer(("169.254.169.254", 0), Answer)
harmless = http.server.ThreadingHTTPServer(("127.0.0.1", metadata.server_port), Answer)
for one in (metadata, harmless):
    threading.Thread(target=one.serve_forever, daemon=True).start()
port = metadata.server_port

# A name whose address changes once somebody has looked at it.
answers = ["127.0.0.1"]
resolve = socket.getaddrinfo
def changing(host, *rest, **more):
    return resolve(answers.pop(0) if host == "data.example" and answers else
                   "169.254.169.254" if host == "data.example" else host, *rest, **more)
socket.getaddrinfo = changing

def tried(url, *prefixes):
    stores = Stores(1.0, policy=UrlPolicy(prefixes))
    try:
        stores.connect(url).head(url)
    except StoreDenied as error:
        return str(error)
    finally:
        stores.close()
    return ""

found = {
    "direct": tried(f"http://169.254.169.254:{port}/secret"),
    "redirect": tried(f"http://127.0.0.1:{port}/redirect"),
    "listed redirect": tried(f"http://127.0.0.1:{port}/redirect", f"http://127.0.0.1:{port}/"),
    "first": tried(f"http://data.example:{port}/secret"),
    "then": tried(f"http://data.example:{port}/secret", f"http://data.example:{port}/"),
    "listed": tried(f"http://169.254.169.254:{port}/fine", f"http://169.254.169.254:{port}/fine"),
}
print(json.dumps([found, asked]))
"""


def test_no_redirect_and_no_change_of_dns_leads_to_a_metadata_address():
    """In a network of its own, where the address of clouds' metadata is ours."""
    network = 'ip link set lo up && ip addr add 169.254.169.254/32 dev lo && exec "$@"'
    command = ["unshare", "-rn", "sh", "-c", network, "sh", sys.executable, "-c", ISOLATED]
    environ = {name: v for name, v in os.environ.items() if not name.lower().endswith("_proxy")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=environ,
        check=False,
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip(f"no network namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    found, asked = json.loads(done.stdout)
    assert "link-local" in found["direct"]
    assert "link-local" in found["redirect"]
    assert "is not below" in found["listed redirect"]
    assert found["first"] == ""
    assert "link-local" in found["then"]
    assert found["listed"] == ""
    assert asked == ["/redirect", "/redirect", "/secret", "/fine"]


NODE = NodeConfig("/c", 1 << 26, 1 << 27, 1 << 24, 2, 16, 30.0, 120.0, 30.0)

GOOD = """
import functools, importlib, os, subprocess
from pathlib import Path
from subprocess import Popen, getoutput

letters_of = getoutput
tool = functools.partial(getoutput, "touch {marker}")
dump = Path("{marker}").write_text


@functools.wraps(os.system)
def disguised(columns):
    return os.system("touch {marker}")


def letters(columns):
    return columns


class Tokenise:
    run = staticmethod(getoutput)

    def __call__(self, columns):
        return columns


ready = Tokenise()


def __getattr__(name):
    return importlib.import_module(name).system
"""


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that its operator trusts, which imports what he does not mean."""
    name = f"good_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(GOOD.replace("{marker}", str(tmp_path / "marker")))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "path",
    [
        "subprocess.getoutput",  # through a module that it imports
        "subprocess",
        "getoutput",  # a function that it imports
        "letters_of",  # under another name
        "Popen",  # a class that it imports, and a worker would make one
        "Path",
        "tool",  # what stands for one of another module
        "dump",  # a method of an object of another module's class
        "disguised",  # it says itself that it is another's
        "Tokenise.run",  # through a class of its own
        "letters.__globals__",
        "letters.__call__",
        "__builtins__",
        "__getattr__",  # calls that make names up
        "os",
        "antigravity",
        "nothing:subprocess.getoutput",
    ],
)
def test_a_module_gives_only_what_it_defines(good: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"does not define|has no") as caught:
        loaded("map", f"{good}:{path}")
    assert caught.value.field == "map"
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("path", ["letters", "Tokenise", "ready"])
def test_functions_classes_and_objects_of_a_module_are_called(good: str, path: str) -> None:
    assert loaded("map", f"{good}:{path}").call({"a": 1}) == {"a": 1}


def test_the_error_says_where_a_function_is_at_home(good: str) -> None:
    with pytest.raises(ConfigError, match=r"it is getoutput of 'subprocess'\. Workers call only"):
        loaded("collate", f"{good}:letters_of")


@pytest.mark.parametrize(
    "name",
    [
        "mine.text_of_others:f",
        "mine.textual.more:f",
        "mine:f",
        "mine.text:_shell",
        "mine.text:__getattr__",
        "mine.text.__main__:f",
        "mine.audio:decode_and_run",
        "mine.audio:decode.f",
        "mine.audio.more:decode",
        "mine.text:os.system",
        "mine.text::f",
        "mine.text:f:g",
        "mine.pack.../x:f",
        "mine.pack./../../x:f",
        "mine.pack:f\n",
        " mine.text:f",
        "mine.text",
        "",
    ],
)
def test_an_entry_of_allowed_functions_has_nothing_beside_it(name: str) -> None:
    config = structs.replace(NODE, allowed_functions="mine.text: mine.audio:decode mine.pack.")
    with pytest.raises(
        ConfigError, match=r"this node runs only those that it lists: mine\.text:, mine\.audio"
    ):
        check_allowed(config, "map", name)


@pytest.mark.parametrize(
    "name", ["mine.text:f", "mine.audio:decode", "mine.pack:f", "mine.pack.deep.er:f"]
)
def test_an_entry_of_allowed_functions_has_a_module_a_function_or_a_package(name: str) -> None:
    config = structs.replace(NODE, allowed_functions="mine.text: mine.audio:decode mine.pack.")
    check_allowed(config, "map", name)
    check_allowed(structs.replace(NODE, allowed_functions="mine.text:_f"), "map", "mine.text:_f")


def test_a_trainer_sends_no_name_of_several_steps() -> None:
    with pytest.raises(ConfigError, match="one name after the colon"):
        function_name("good.mod:subprocess.getoutput", "map")
    with pytest.raises(ConfigError, match="is part of a class"):
        function_name(UrlPolicy.check, "map")


@pytest.mark.parametrize(
    "url",
    [
        "zip://x/a.parquet",
        "reference://x/a.parquet",
        "generic://file:///etc/passwd",
        "asynclocal:///etc/passwd",
        "git:///srv/repository:main@a.parquet",
        "simplecache::file:///etc/passwd",
        "memory://a::simplecache/x.parquet",
        "zip://x.parquet::archive/x.parquet",
        "reference://x::references.json/a.parquet",
        "memory://a::zip",
    ],
)
def test_no_url_reaches_a_file_system_through_another(url: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read by range|names no bucket"):
        open_store(normalise(url).rpartition("/x.parquet")[0] or normalise(url), 1.0, UrlPolicy())


@pytest.mark.parametrize(
    "base",
    [
        *("s3://evil.example#", "s3://evil.example?x=", "s3://u@evil.example\\", "s3://a b"),
        *("gs://evil.example#", "gs://%2e%2e", "abfss://c@evil.example/x?", "s3://..%2fother"),
        "az://a@b@c",
    ],
)
def test_no_bucket_is_named_as_a_server(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    with pytest.raises(ConfigError, match="cannot be the name of a bucket"):
        open_store(base, 1.0, UrlPolicy())


@pytest.mark.parametrize(
    "url",
    [
        "s3://good/train/../../other/x",
        "s3://good/train/..\\x",
        "S3A://good/train-2/x",
        "s3://good/train{,/../../other}/x",
        "file:///data/../etc/passwd",
        "local:///etc/passwd",
        "file://localhost/etc/passwd",
        "/data/../etc/passwd",
        "http://good.example@169.254.169.254/train/x",
        "http://good.example\\@evil.example/train/x",
        "http://good.example.evil.example/train/x",
        "http://good.example:80#@evil.example/train/x",
        "http://good.example/train/%2E%2e/x",
        "https://good.example/train/x",
        "memory://good/train/x",
    ],
)
def test_no_spelling_of_a_url_leaves_the_prefixes(url: str) -> None:
    prefixes = ("s3://good/train", "file:///data", "http://good.example/train")
    with pytest.raises(DataplaneError):
        UrlPolicy(prefixes).check_names([url])
    with pytest.raises(DataplaneError):
        UrlPolicy(prefixes).check(normalise(url))


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "\ud800", "\u202eb", "a\x00", "\x9b1m"])
def test_a_name_has_nothing_that_a_terminal_acts_on(name: str) -> None:
    with pytest.raises(ConfigError, match=r"job_id .* has the character") as caught:
        check_name("job_id", name)
    assert name not in str(caught.value)
    check_name("job_id", "größe 火 pretrain-7/é")


def test_text_that_cannot_be_sent_is_refused_by_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"'where \\ud800 here' has half of a surrogate pair"):
        encode(DatasetSource(("where \ud800 here",)))
