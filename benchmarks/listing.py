"""How long a list of many objects takes.

    python benchmarks/listing.py [--objects 200000] [--delay 50]

A server on this machine gives lists as S3 does, a thousand keys a page, and waits before each. The
list is made with one request after the other, and as a node makes it. CPU is that of this process;
the server has one of its own.
"""

from __future__ import annotations

import argparse
import http.server
import multiprocessing
import os
import threading
import time
import urllib.parse
from bisect import bisect_right
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection

from dataplane.model import ObjectInfo
from dataplane.store.connect import open_store
from dataplane.store.retry import Retrying

_PAGE = 1000
_BUCKET, _FOLDER = "s3://bucket", "train/"


def main() -> None:
    """Print one line for each way and round."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--delay", type=float, default=50.0, help="milliseconds a page")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(
        target=_serve, args=(there, given.objects, given.delay / 1000), daemon=True
    )
    server.start()
    os.environ.update(
        AWS_ACCESS_KEY_ID="any",
        AWS_SECRET_ACCESS_KEY="any",
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{here.recv()}",
        AWS_REGION="us-east-1",
    )
    for _ in range(given.rounds):
        store = open_store(_BUCKET)
        _measure("one after the other", here, given.objects, store.list)
        _measure("as a node does it", here, given.objects, Retrying(store, _BUCKET).list)
    server.kill()


def _measure(
    way: str, server: Connection, count: int, listed: Callable[[str], Iterable[ObjectInfo]]
) -> None:
    started, spent = time.perf_counter(), time.process_time()
    found = list(listed(f"{_BUCKET}/{_FOLDER}"))
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - spent
    server.send("")
    pages = server.recv()
    assert len({one.url for one in found}) == count
    print(
        f"{way}: {count:,} objects in {took_s:.2f} s, {pages} pages, CPU {cpu_s:.2f} s", flush=True
    )


def _serve(told: Connection, count: int, delay_s: float) -> None:
    """Tells its port, and for each message how many pages it has given since the one before."""
    keys = [f"{_FOLDER}shard-{i:07d}.tar" for i in range(count)]
    asked: list[str] = []

    class ListAnswer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))
            time.sleep(delay_s)
            after = query.get("continuation-token") or query.get("start-after", "")
            asked.append(after)
            first = bisect_right(keys, after)
            page = keys[first : first + _PAGE]
            text = "".join(_entry(key) for key in page)
            more = first + _PAGE < count
            if more:
                text += f"<NextContinuationToken>{page[-1]}</NextContinuationToken>"
            ended = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
            body = f"<ListBucketResult>{ended}{text}</ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ListAnswer)
    told.send(server.server_port)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        told.recv()
        told.send(len(asked))
        asked.clear()


def _entry(key: str) -> str:
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-10-21T07:28:00.000Z</LastModified>"
        f'<ETag>"{hash(key)}"</ETag><Size>100</Size></Contents>'
    )


if __name__ == "__main__":
    main()
