"""Who may do what: a file of users with a login page, or a header that a proxy sets.

A line of the file is ``name:permissions:$scrypt$ln=14,r=8,p=5$salt$hash``. What stands between the
dollars says how the hash was made, so that later versions can make others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from tempfile import NamedTemporaryFile

from itsdangerous import BadSignature, URLSafeTimedSerializer

from celery_dlq.errors import NotFound, SettingsError
from celery_dlq.letters.printable import one_line
from celery_dlq.logs import get_logger
from celery_dlq.web.http import Permission, Request, RequestError, User

logger = get_logger("celery_dlq.web")

COOKIE = "dlq_login"
MAX_AGE_SECONDS = 12 * 3600
MIN_PASSWORD = 8
MAX_PASSWORD = 1000

# As safe as one pass with 128 MB of memory, in 16 MB.
# Source: https://cheatsheetseries.owasp.org/cheatsheets/Password_Storage_Cheat_Sheet.html#scrypt
_LOG_N, _R, _P = 14, 8, 5
_MOST_MEMORY = 128 * 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,100}")
_HASH = re.compile(r"\$scrypt\$ln=(\d{1,2}),r=(\d{1,2}),p=(\d{1,2})\$([\w+/=]+)\$([\w+/=]+)")

_TRIES, _SECONDS_A_TRY = 5, 30.0
_TRIES_OF_ALL, _SECONDS_A_TRY_OF_ALL = 100, 1.0
_MOST_ADDRESSES = 10_000


@dataclass(frozen=True, kw_only=True)
class Account:
    """One line of the file."""

    name: str  # The user's name
    permissions: frozenset[Permission]  # What they may do
    hashed: str  # Their password's hash, and how it was made

    @classmethod
    def parse(cls, line: str) -> Account:
        """Read a line."""
        name, _, rest = line.partition(":")
        permissions, _, hashed = rest.partition(":")
        if not _NAME.fullmatch(name):
            raise ValueError("expected a name of letters, digits and . _ @ + -")
        if not _HASH.fullmatch(hashed):
            raise ValueError("expected name:permissions:$scrypt$…, as `dlq web-user` writes it")
        known = {str(permission): permission for permission in Permission}
        asked = [text.strip() for text in permissions.split(",")]
        if not set(asked) <= set(known):
            raise ValueError(f"expected permissions of {', '.join(known)}")
        return cls(name=name, permissions=frozenset(known[text] for text in asked), hashed=hashed)

    def line(self) -> str:
        """The line of the file."""
        return f"{self.name}:{','.join(sorted(self.permissions))}:{self.hashed}"

    def mark(self) -> str:
        """Changes with the password; ends the sessions of the old one."""
        return hashlib.sha256(self.hashed.encode()).hexdigest()[:16]


def hash_of(password: str) -> str:
    """Hash a password with a new salt."""
    salt = secrets.token_bytes(16)
    made = _scrypt(password, salt, _LOG_N, _R, _P)
    texts = (base64.b64encode(raw).decode() for raw in (salt, made))
    return f"$scrypt$ln={_LOG_N},r={_R},p={_P}${'$'.join(texts)}"


def matches(password: str, hashed: str) -> bool:
    """True if a hash is that of the password; takes the same time for wrong ones."""
    found = _HASH.fullmatch(hashed)
    if found is None:
        return False
    try:
        salt, expected = (base64.b64decode(text, validate=True) for text in found.group(4, 5))
        made = _scrypt(password, salt, *map(int, found.group(1, 2, 3)))
    except (ValueError, binascii.Error):
        logger.warning("A password hash of the users' file cannot be used; set the password again")
        return False
    return hmac.compare_digest(made, expected)


def _scrypt(password: str, salt: bytes, log_n: int, r: int, p: int) -> bytes:
    raw = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(raw, salt=salt, n=2**log_n, r=r, p=p, maxmem=_MOST_MEMORY, dklen=32)


class UsersFile:
    """The users of a file, which is read again when it changes."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._seen: object = None
        self._accounts: dict[str, Account] = {}

    def load(self) -> dict[str, Account]:
        """Read the file."""
        try:
            text = self.path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else "it is no text"
            raise SettingsError(
                f"expected {self.path} to be a file of users, got: {why}; "
                f"make one with `dlq web-user NAME --file {self.path}`"
            ) from exc
        accounts: dict[str, Account] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                account = Account.parse(line.strip())
            except ValueError as exc:
                raise SettingsError(f"line {number} of {self.path}: {exc}") from exc
            accounts[account.name] = account
        return accounts

    def account(self, name: str) -> Account | None:
        """The account of a name, as the file is now; nobody is known while it is unusable."""
        with self._lock:
            try:
                found = self.path.stat()
                seen: object = (found.st_mtime_ns, found.st_size, found.st_ino)
            except OSError as exc:
                seen = str(exc)
            if seen != self._seen:
                self._seen, self._accounts = seen, {}
                try:
                    self._accounts = self.load()
                except SettingsError as exc:
                    logger.warning("Nobody can log in: %s", exc)
            return self._accounts.get(name)

    def put(self, name: str, password: str, permissions: Iterable[Permission]) -> None:
        """Add a user, or replace them; the file is replaced as a whole."""
        if not _NAME.fullmatch(name):
            raise SettingsError(
                f"expected a name of at most 100 letters, digits and . _ @ + -, got {name!r}"
            )
        if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
            raise SettingsError(
                f"expected a password of {MIN_PASSWORD} to {MAX_PASSWORD} characters, "
                f"got {len(password)}"
            )
        may = frozenset({Permission.VIEW, *permissions})
        account = Account(name=name, permissions=may, hashed=hash_of(password))
        self._write({**self._existing(), name: account})

    def remove(self, name: str) -> None:
        """Remove a user; their sessions end."""
        accounts = self.load()
        if accounts.pop(name, None) is None:
            raise NotFound(f"there is no user {name!r} in {self.path}")
        self._write(accounts)

    def _existing(self) -> dict[str, Account]:
        return self.load() if self.path.exists() else {}

    def _write(self, accounts: dict[str, Account]) -> None:
        text = "# Users of `dlq web`, written by `dlq web-user`.\n"
        text += "".join(f"{account.line()}\n" for account in accounts.values())
        path = self.path.resolve()
        try:
            # mode 0600; in the same folder, so that the name changes in one step
            with NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                try:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                    Path(file.name).replace(path)
                except BaseException:
                    with suppress(OSError):
                        Path(file.name).unlink()
                    raise
        except OSError as exc:
            raise SettingsError(
                f"expected to be able to write {self.path}, got: {exc.strerror}"
            ) from exc


class Attempts:
    """Slows down who guesses passwords: some tries at once, then one each half minute.

    All addresses together have more tries, and only so many addresses are remembered.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._addresses: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._all = (float(_TRIES_OF_ALL), clock())

    def take(self, address: str) -> None:
        """Use up one try."""
        with self._lock:
            now, key = self._clock(), _network(address)
            left, at = self._addresses.pop(key, (float(_TRIES), now))
            left = min(_TRIES, left + (now - at) / _SECONDS_A_TRY)
            all_left = min(
                _TRIES_OF_ALL, self._all[0] + (now - self._all[1]) / _SECONDS_A_TRY_OF_ALL
            )
            refused = left < 1 or all_left < 1
            used = 0 if refused else 1
            self._addresses[key] = (left - used, now)
            self._all = (all_left - used, now)
            while len(self._addresses) > _MOST_ADDRESSES:
                self._addresses.popitem(last=False)
        if refused:
            raise RequestError(
                429, f"too many logins failed; try again in {_SECONDS_A_TRY:.0f} seconds"
            )

    def give_back(self, address: str) -> None:
        """The password was right, so the try does not count."""
        with self._lock:
            key = _network(address)
            left, at = self._addresses.get(key, (float(_TRIES), self._clock()))
            self._addresses[key] = (min(_TRIES, left + 1), at)
            self._all = (min(_TRIES_OF_ALL, self._all[0] + 1), self._all[1])


def _network(address: str) -> str:
    """An address, or for IPv6 what one customer of a provider has: the first 64 bits."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    return str(found) if found.version == 4 else found.exploded[:19]  # noqa: PLR2004


class Login:
    """Logs users of a file in, and knows their sessions."""

    def __init__(self, users: UsersFile, secret: str, *, allow_changes: bool, why_not: str) -> None:
        self._users = users
        self._signer = URLSafeTimedSerializer(secret, salt="celery_dlq.web.login")
        self._allow_changes = allow_changes
        self._why_not = why_not
        self._attempts = Attempts()
        self._hashing = threading.Semaphore(2)  # each takes 16 MB and a fifth of a second
        self._nobody = hash_of(secrets.token_urlsafe(16))
        self._ended: OrderedDict[str, float] = OrderedDict()

    def __call__(self, request: Request) -> User | None:
        """Who is logged in; ``None`` if nobody is."""
        found = self._session(request)
        if found is None:
            return None
        _, account = found
        may = account.permissions if self._allow_changes else {Permission.VIEW}
        return User(name=account.name, permissions=account.permissions & may, why_not=self._why_not)

    def log_in(self, request: Request) -> tuple[str, str] | None:
        """Check a name and a password; a wrong name costs as much as a wrong password."""
        self._attempts.take(request.client)
        name, password = request.value("name"), request.value("password")[:MAX_PASSWORD]
        account = self._users.account(name)
        with self._hashing:
            right = matches(password, account.hashed if account else self._nobody)
        if account is None or not right:
            logger.warning("A login failed at %s", one_line(request.client) or "an unknown address")
            return None
        self._attempts.give_back(request.client)
        token = self._signer.dumps([account.name, account.mark(), secrets.token_urlsafe(12)])
        return request.set_cookie(COOKIE, str(token), MAX_AGE_SECONDS)

    def log_out(self, request: Request) -> tuple[str, str]:
        """End the session; a copy of its cookie is worth nothing from now on."""
        found = self._session(request)
        if found is not None:
            now = time.monotonic()
            self._ended[found[0]] = now
            while self._ended and now - next(iter(self._ended.values())) > MAX_AGE_SECONDS:
                self._ended.popitem(last=False)
        return request.set_cookie(COOKIE, "", 0)

    def _session(self, request: Request) -> tuple[str, Account] | None:
        cookie = request.cookie(COOKIE)
        if not cookie:
            return None
        try:
            name, mark, session = self._signer.loads(cookie, max_age=MAX_AGE_SECONDS)
        except (BadSignature, ValueError, TypeError):
            return None
        account = self._users.account(name)
        if account is None or account.mark() != mark or session in self._ended:
            return None
        return session, account


@dataclass(frozen=True, kw_only=True)
class TrustedHeader:
    """Users named by a proxy that has checked them."""

    name: str  # The header, in lower case
    permissions: frozenset[Permission]  # What they may do
    why_not: str  # What is said to those who may not change anything

    def __call__(self, request: Request) -> User | None:
        """Who asks."""
        if not request.proxied:
            raise RequestError(
                403,
                f"expected a request from a trusted proxy, got one from {request.client}; "
                f"name the proxy's address with --trusted-proxy",
            )
        user = request.headers.get(self.name, "").strip()
        if not user or len(user) > 200:  # noqa: PLR2004
            raise RequestError(401, f"expected the proxy to name a user in {self.name}, got none")
        return User(name=user, permissions=self.permissions, why_not=self.why_not)
