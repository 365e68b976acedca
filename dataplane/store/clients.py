"""Creates obstore clients from the environment.

obstore itself reads AWS_*, GOOGLE_* and AZURE_*; this module adds the profiles of ~/.aws (with SSO
and the like), and permission to use an http endpoint without TLS.
"""

from __future__ import annotations

import datetime as dt
import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from dataplane.errors import ConfigError
from dataplane.store.connections import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    # These exist for type checkers only: obstore's module does not have them at run time.
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

Client = S3Store | GCSStore | AzureStore | HTTPStore

CREDENTIAL_LIFE = dt.timedelta(minutes=5)
_S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_HOST = re.compile(r"[\w.\-]+|[0-9a-f:.]*:[0-9a-f:.]*", re.IGNORECASE)
# Other characters would end the host's name where the bucket is a part of it, and requests, with
# their credentials, would go elsewhere.
_BUCKET = re.compile(r"[\w.\-]+(@[\w.\-]+)?", re.ASCII)
_NO_RETRIES: RetryConfig = {"max_retries": 0}


def client(base: str, environment: Mapping[str, str], request_timeout_s: float) -> Client:
    """Make a client of one bucket, container or http server.

    Raises:  ConfigError: no bucket has this name, the profile does not exist, or the endpoint is
    not a url.  ValueError and obstore's own errors, for other mistakes.
    """
    scheme, _, authority = base.partition("://")
    if scheme not in ("http", "https") and not _BUCKET.fullmatch(authority):
        raise ConfigError(
            f"{base}: {authority!r} cannot be the name of a bucket or container, which has letters,"
            " digits, dots, hyphens and underscores",
            found=authority,
        )
    options: ClientConfig = {
        "connect_timeout": dt.timedelta(seconds=min(CONNECT_TIMEOUT_S, request_timeout_s)),
        "timeout": dt.timedelta(seconds=request_timeout_s),
    }
    if scheme == "s3":
        return _s3(authority, environment, options)
    if scheme == "gs":
        return GCSStore(authority, client_options=options, retry_config=_NO_RETRIES)
    if scheme in ("http", "https"):
        options["allow_http"] = scheme == "http"
        _check_endpoint(base, "the url")
        return HTTPStore(base, client_options=options, retry_config=_NO_RETRIES)
    return AzureStore.from_url(base, client_options=options, retry_config=_NO_RETRIES)


def may_renew(base: str, environment: Mapping[str, str]) -> bool:
    """Whether a new client may get other credentials: those in a process's environment never
    change.
    """
    is_fixed = environment.get("AWS_ACCESS_KEY_ID") and not _needs_profile(environment)
    return not (base.startswith("s3://") and is_fixed)


def _s3(bucket: str, environment: Mapping[str, str], options: ClientConfig) -> S3Store:
    config: S3Config = {}
    endpoint = next((environment[name] for name in _S3_ENDPOINTS if environment.get(name)), "")
    provider = None
    if _needs_profile(environment):
        session = _profile(environment)
        endpoint = endpoint or session.get_scoped_config().get("endpoint_url", "")
        region = session.get_config_variable("region")
        if region:
            config["region"] = region
        credentials = session.get_credentials()
        provider = _provider(credentials) if credentials is not None else None
    if endpoint:
        _check_endpoint(endpoint, "AWS_ENDPOINT_URL")
        config["endpoint"] = endpoint
        if endpoint.startswith("http://"):
            options["allow_http"] = True
    return S3Store(
        bucket,
        config=config,
        client_options=options,
        retry_config=_NO_RETRIES,
        credential_provider=provider,
    )


def _check_endpoint(endpoint: str, origin: str) -> None:
    """Refuse an endpoint that is not a url, since obstore panics at the first request to it."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        port = parts.port
    except ValueError:
        parts, port = urllib.parse.urlsplit(""), None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or port == 0:
        raise ConfigError(
            f"{origin} is {endpoint!r}, which is not an endpoint: write http://host:port or "
            "https://host"
        )


def _needs_profile(environment: Mapping[str, str]) -> bool:
    """Whether credentials come from ~/.aws: a profile is named, or exists and nothing else is
    given.
    """
    if environment.get("AWS_PROFILE"):
        return True
    given = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(environment.get(name) for name in given):
        return False
    home = Path(environment.get("HOME", "/")) / ".aws"
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE") or home / "credentials",
        environment.get("AWS_CONFIG_FILE") or home / "config",
    )
    return any(Path(file).is_file() for file in files)


def _profile(environment: Mapping[str, str]) -> Any:
    import botocore.exceptions
    import botocore.session

    session = botocore.session.Session(profile=environment.get("AWS_PROFILE"))
    try:
        session.get_scoped_config()
    except botocore.exceptions.BotoCoreError as cause:
        raise ConfigError(f"AWS_PROFILE or ~/.aws cannot be used: {cause}") from cause
    return session


def _provider(credentials: Any) -> Callable[[], S3Credential]:
    """Botocore refreshes early enough that credentials stay valid for CREDENTIAL_LIFE."""

    def provide() -> S3Credential:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": dt.datetime.now(dt.UTC) + CREDENTIAL_LIFE,
        }

    return provide
