"""The keys that requests bring, and the file in which an operator keeps them."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from lilliput.errors import BadRequest
from lilliput.gateway.account import Account, Limits
from lilliput.gateway.problems import Problem

logger = logging.getLogger(__name__)

#: of a file of keys; some that are no such file never end
_MOST_CHARACTERS = 1 << 20
_LIMITS = [limit.name.replace("_", "-") for limit in fields(Limits)]
_LINE = f"a line is NAME KEY and perhaps limits: {', '.join(f'{name}=N' for name in _LIMITS)}"


@dataclass(frozen=True)
class Key:
    """:ivar name: stands for it in logs and metrics"""

    name: str
    secret: str = field(repr=False)
    limits: Limits = field(default_factory=Limits)


class Keys:
    """Of which a request must bring one. If there are none, everyone may come in.

    Raises `BadRequest` if two have the same name, or are the same.

    :ivar accounts: theirs, in their order
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        keys = list(keys)
        for number, key in enumerate(keys):
            _check_new(key, keys[:number])
        self.accounts = [Account(key.name, key.limits) for key in keys]
        self._secrets = [key.secret.encode() for key in keys]
        self._anyone = Account()

    def account(self, authorization: str) -> Account:
        """Whose a request with that header is. Raises `Problem` 401."""
        if not self._secrets:
            return self._anyone
        scheme, _, given = authorization.partition(" ")
        key = given.strip().encode(errors="replace")
        matches = [hmac.compare_digest(key, right) for right in self._secrets]  # all: time shall tell nothing
        if scheme.lower() == "bearer" and any(matches):
            return self.accounts[matches.index(True)]
        raise Problem(
            "Give an API key that this server knows, as in `Authorization: Bearer KEY`.",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """The keys in a file: one a line, `NAME KEY` and limits; empty lines and those that begin with # are skipped.

    Warns if others than its owner may read it. Raises `BadRequest` that names the line, and never a key.
    """
    file = Path(path).expanduser()
    try:
        with file.open(encoding="utf-8") as opened:
            mode, text = os.fstat(opened.fileno()).st_mode, opened.read(_MOST_CHARACTERS + 1)
    except OSError as e:
        raise BadRequest(f"cannot read the API's keys {file}: {e.strerror or e}") from e
    except UnicodeDecodeError as e:
        raise BadRequest(f"the API's keys {file} are no text in UTF-8") from e
    if len(text) > _MOST_CHARACTERS:
        raise BadRequest(f"{file} has more than {_MOST_CHARACTERS:,} characters, so it is no file of keys")
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = _key_of(line.split())
            _check_new(key, keys)
        except BadRequest as e:
            raise BadRequest(f"{file}, line {number}: {e}") from None
        keys.append(key)
    if not keys:
        raise BadRequest(f"there is no key in {file}; {_LINE}")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        logger.warning("others on this machine may read the API's keys: chmod 600 %s", file)
    return keys


def _key_of(words: list[str]) -> Key:
    if len(words) < 2 or words[1].partition("=")[0] in _LIMITS:
        raise BadRequest(f"there is no key; {_LINE}")
    name, secret, *rest = words
    if not secret.isascii():
        raise BadRequest("a key has other signs than ASCII's, which cannot be sent")
    limits: dict[str, int] = {}
    for word in rest:  # which may be a key in the wrong place, so it is not shown
        limit, _, number = word.partition("=")
        if limit not in _LIMITS:
            raise BadRequest(f"what follows the key is no limit; {_LINE}")
        if limit in limits:
            raise BadRequest(f"{limit} is there twice")
        if not (number.isdecimal() and number.isascii()) or not int(number):
            raise BadRequest(f"{limit} must be a whole number from 1 on")
        limits[limit] = int(number)
    return Key(name, secret, Limits(**{limit.replace("-", "_"): number for limit, number in limits.items()}))


def _check_new(key: Key, known: Iterable[Key]) -> None:
    for other in known:
        if other.name == key.name:
            raise BadRequest(f"two keys have the name {key.name!r}")
        if other.secret == key.secret:
            raise BadRequest(f"the keys of {other.name!r} and {key.name!r} are the same")
