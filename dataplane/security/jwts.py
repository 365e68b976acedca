"""JSON Web Tokens: tokens that name their holder, roles, an expiry and limits.

The algorithms are fixed: HS256 with a shared token as the secret, and RS256 or ES256 with the
public key of `jwt_key`, according to the kind of that key. A token names the audience "dataplane",
expires within a day, and has the roles of its holder; it may name one job, and prefixes of urls.

Source: RFC 7519; RFC 8725, 3.1 and 3.2, about algorithms.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dataplane.base.trace import UNSAFE
from dataplane.model.errors import ConfigError
from dataplane.security.private_file import Watched, content
from dataplane.security.tokens import Caller, Role, TokenSource, WrongTokenError

AUDIENCE = "dataplane"
LIFE_S_MAX = 24 * 3600
INSTALL = "pip install 'dataplane-loader[jwt]'"
_LEEWAY_S = 30
_SECRET_BYTES_MIN = 32
_RSA_BITS_MIN = 2048
_KEY_BYTES_MAX = 1 << 16
_KNOWN_MAX = 4096
_JOB_LENGTH_MAX = 256
_PREFIXES_MAX = 64
_ALGORITHMS = ("HS256", "RS256", "ES256")
_YEAR_9999 = 253402300799.0

# Reasons by the names of PyJWT's errors, since PyJWT itself is imported late.
_WHY: Mapping[str, str] = {
    "ExpiredSignatureError": "the token has expired",
    "ImmatureSignatureError": "the token is not valid yet",
    "InvalidAudienceError": f"the token is not for the audience {AUDIENCE!r}",
    "MissingRequiredClaimError": "the token lacks the claim `exp` or `aud`",
}

_Key = tuple[str, Any]


class Jwts:
    """Checks tokens. Valid tokens are cached until they expire, or a key changes."""

    def __init__(
        self, tokens: TokenSource, key_file: str = "", clock: Callable[[], float] = time.time
    ) -> None:
        """Load the keys.

        Raises:  ConfigError: the key cannot be used, or PyJWT is missing.
        """
        self._tokens = tokens
        self._clock = clock
        self.watched: Watched[_Key] | None = None
        if key_file:
            self.watched = Watched("key of JWTs", (key_file,), partial(public_key, key_file))
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int, int], tuple[Caller, float]] = OrderedDict()

    def caller(self, token: str) -> Caller:
        """Return the holder of this token.

        Raises:  WrongTokenError.
        """
        secrets, at = self._tokens.current()
        key, version = (None, 0) if self.watched is None else self.watched.current()
        place = (token, at, version)
        with self._lock:
            known = self._known.get(place)
        if known is None:
            claims = _verified(token, secrets, key)
            known = _caller(claims, self._clock())
            with self._lock:
                self._known[place] = known
                if len(self._known) > _KNOWN_MAX:
                    self._known.popitem(last=False)
        caller, ends = known
        if self._clock() > ends:
            raise WrongTokenError("the token has expired")
        return caller


def is_jwt(token: str) -> bool:
    """Return whether a token has the form of a JWT."""
    return token.startswith("eyJ") and token.count(".") == 2


def outline(token: str, now: float) -> tuple[str, str]:
    """Return a description of a JWT, and why a coordinator would refuse it now, apart from its
    signature; "" if there is no such reason. The token's holder can call this without a key and
    without PyJWT.
    """
    if not is_jwt(token):
        return "", ""
    try:
        header, claims = (json.loads(_decoded(part)) for part in token.split(".")[:2])
        ends, begins = float(claims["exp"]), float(claims.get("nbf", now))
        audience, algorithm = claims["aud"], str(header["alg"])
        at = dt.datetime.fromtimestamp(min(max(ends, 0.0), _YEAR_9999), dt.UTC)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "a JWT", "it is damaged, or lacks the claim `exp` or `aud`"
    found = f"a JWT until {at:%Y-%m-%d %H:%M} UTC"
    if now > ends + _LEEWAY_S:
        return found, "it has ended: renew it"
    if now < begins - _LEEWAY_S:
        return found, "it is not valid yet: check the clock"
    if AUDIENCE not in (audience if isinstance(audience, list) else [audience]):
        return found, f"it is not for the audience {AUDIENCE!r}"
    if algorithm not in _ALGORITHMS:
        return found, f"its algorithm is {algorithm[:16]!r}, not one of {', '.join(_ALGORITHMS)}"
    try:
        caller, _ = _caller(claims, now)
    except WrongTokenError as error:
        return found, str(error)
    return f"{found}, for {', '.join(sorted(role.value for role in caller.roles))}", ""


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def _verified(token: str, secrets: tuple[str, ...], public: _Key | None) -> Mapping[str, Any]:
    """Return the claims of a token with a valid signature, audience and time."""
    try:
        import jwt
    except ImportError:
        raise WrongTokenError(f"JWTs need PyJWT at the coordinator ({INSTALL})") from None
    try:
        algorithm = str(jwt.get_unverified_header(token).get("alg"))
    except jwt.PyJWTError:
        raise WrongTokenError("the token is damaged") from None
    keys: list[Any] = []
    if algorithm == "HS256":
        keys = [
            secret for secret in secrets if len(secret) >= _SECRET_BYTES_MIN and not is_jwt(secret)
        ]
    elif public is not None and algorithm == public[0]:
        keys = [public[1]]
    why = f"the coordinator has no key for tokens with the algorithm {algorithm[:16]!r}"
    for key in keys:
        try:
            return jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=AUDIENCE,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "aud"]},
            )
        except jwt.InvalidSignatureError:
            why = "the token is signed with another key"
        except jwt.PyJWTError as error:
            name = type(error).__name__
            why = _WHY.get(name, f"the token is not valid ({name})")
            break
    raise WrongTokenError(why)


def _caller(claims: Mapping[str, Any], now: float) -> tuple[Caller, float]:
    """Return the caller that the claims describe, and when the token expires."""
    ends = float(claims["exp"])
    if ends > now + LIFE_S_MAX + _LEEWAY_S:
        raise WrongTokenError("the token ends in more than 24 hours: make shorter ones")
    roles = claims.get("roles")
    known = {role.value: role for role in Role}
    if not isinstance(roles, list) or not roles or not {*map(str, roles)} <= known.keys():
        raise WrongTokenError(f"its claim `roles` is not a list of {', '.join(known)}")
    job = claims.get("job", "")
    if not isinstance(job, str) or len(job) > _JOB_LENGTH_MAX:
        raise WrongTokenError("its claim `job` is not the name of a job")
    subject = claims.get("sub", "")
    if not isinstance(subject, str) or len(subject) > _JOB_LENGTH_MAX or UNSAFE.search(subject):
        raise WrongTokenError("its claim `sub` is not a name")
    datasets = claims.get("datasets")
    if datasets is not None and not _are_prefixes(datasets):
        raise WrongTokenError(f"its claim `datasets` is not a list of up to {_PREFIXES_MAX} urls")
    return (
        Caller(
            frozenset(known[role] for role in roles),
            job,
            None if datasets is None else tuple(datasets),
            subject,
        ),
        ends + _LEEWAY_S,
    )


def _are_prefixes(given: object) -> bool:
    return (
        isinstance(given, list)
        and len(given) <= _PREFIXES_MAX
        and all(isinstance(one, str) and "://" in one for one in given)
    )


def public_key(path: str) -> _Key:
    """Return the algorithm of a public key, and the key.

    Raises:  ConfigError: the key cannot be used, or PyJWT is missing.
    """
    try:
        import jwt  # noqa: F401
        from cryptography.hazmat.primitives.asymmetric import ec, rsa
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise ConfigError(
            f"jwt_key is set, and PyJWT with cryptography is not installed: {INSTALL}",
            key="jwt_key",
        ) from error
    pem = content(path, _KEY_BYTES_MAX)
    try:
        key = load_pem_public_key(pem)
    except ValueError as error:
        raise ConfigError(f"{path} is not a public key in PEM", file=path) from error
    if isinstance(key, rsa.RSAPublicKey) and key.key_size >= _RSA_BITS_MIN:
        return "RS256", key
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name == "secp256r1":
        return "ES256", key
    raise ConfigError(
        f"{path} must be an RSA key of at least {_RSA_BITS_MIN} bits, or one of the curve P-256",
        file=path,
    )
