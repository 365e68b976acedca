"""When certificates are valid, compared with what another library reads."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from certificates import Authority
from cryptography import x509

from dataplane.security.tls import why_not_valid

HOUR = dt.timedelta(hours=1)
NOW = dt.datetime.now(dt.UTC)


@pytest.mark.parametrize("years", [1, 40, 300])  # from 2050 on, times are written in another way
def test_a_certificate_is_valid_between_the_times_that_another_library_reads(tmp_path, years):
    files = Authority.made().write(tmp_path, "one", lasts=dt.timedelta(days=365 * years))
    pem = Path(files.cert).read_bytes()
    read = x509.load_pem_x509_certificate(pem)
    for at in (read.not_valid_before_utc, read.not_valid_after_utc, NOW):
        assert why_not_valid(pem, at) == ""
    assert why_not_valid(pem, read.not_valid_before_utc - HOUR).startswith("it begins at")
    assert why_not_valid(pem, read.not_valid_after_utc + HOUR).startswith("it ended at")


def test_what_is_no_certificate_is_nothing_to_complain_about(tmp_path):
    pem = Path(Authority.made().write(tmp_path, "one").cert).read_bytes()
    for cut in (b"", b"no pem", pem[:200], pem[:60] + pem[-60:]):
        assert why_not_valid(cut, NOW) == ""
