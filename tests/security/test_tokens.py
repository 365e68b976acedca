"""Where a token is found, how it is replaced, and that nobody else reads it."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane.model.errors import ConfigError
from dataplane.security.security import Security
from dataplane.security.tokens import find

ONE, OTHER = "one-token-0123456789", "other-token-0123456789"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


CLOCK = Clock()


def source(tmp_path, environ=None, token_file="", makes=True, clock=CLOCK):
    return find(environ or {}, str(token_file), str(tmp_path / "state"), makes=makes, clock=clock)


def test_the_variable_comes_before_the_file_and_the_file_before_the_own_token(tmp_path):
    (tmp_path / "given").write_text(f"{ONE}\n")
    given = source(tmp_path, {"DATAPLANE_TOKEN": OTHER}, tmp_path / "given")
    assert given.first() == OTHER
    assert source(tmp_path, {}, tmp_path / "given").first() == ONE
    assert not (tmp_path / "state").exists()
    early = source(tmp_path, makes=False)
    assert early.first() == ""
    assert Security(early).metadata() == ()
    assert "This process has no token" in Security(early).advice()
    own = source(tmp_path).first()
    assert len(own) >= 32
    assert source(tmp_path, makes=False).first() == own
    # Nodes may start before the first coordinator, and find what it has created at once.
    assert early.first() == own
    (tmp_path / "state" / "token").unlink()
    assert early.first() == own


def test_the_own_token_is_private_and_made_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: source(tmp_path).first(), range(8)))
    assert len(set(found)) == 1
    path = tmp_path / "state" / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"mode 0640: only its owner.*chmod 600"):
        source(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("", "has 0 tokens"),
        ("short\n", "cannot be a token"),
        (f"{ONE} {OTHER}\n", "cannot be a token"),
        (f"{ONE}ü\n", "cannot be a token"),
        (f"{ONE}\n" * 9, "has 9 tokens"),
        ("x" * 5000, "cannot be a token"),
    ],
)
def test_a_source_that_cannot_be_used_is_fatal_and_shows_nothing_of_it(tmp_path, text, words):
    source(tmp_path)  # there would be another one
    path = tmp_path / "given"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        source(tmp_path, {}, path)
    assert ONE not in str(caught.value)
    with pytest.raises(ConfigError, match=words if text else "tokens"):
        source(tmp_path, {"DATAPLANE_TOKEN": text or ""})


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot be created.*--state-dir"):
        source(tmp_path)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(tmp_path, caplog):
    clock, path = Clock(), tmp_path / "given"
    path.write_text(ONE)
    found = source(tmp_path, {}, path, clock=clock)
    path.write_text(f"{OTHER}\n{ONE}\n")
    assert found.first() == ONE  # it looks once a second
    clock.now += 1
    assert found.first() == OTHER
    assert found.accepts(ONE)
    assert found.accepts(OTHER)
    path.unlink()
    clock.now += 1
    assert found.first() == OTHER
    assert "what was read last stays" in caplog.text
    path.write_text(f"{OTHER}\n")
    clock.now += 1
    assert not found.accepts(ONE)
    assert not found.accepts("")
    assert not found.accepts("ü")
    caplog.clear()


def test_no_text_of_it_contains_the_token(tmp_path):
    found = source(tmp_path, {"DATAPLANE_TOKEN": ONE})
    security = Security(found)
    for text in (repr(found), str(found), repr(security), str(security), security.advice()):
        assert ONE not in text
    assert "$DATAPLANE_TOKEN" in security.advice()
    assert "This process has no token" in Security().advice()
