"""Who may ask. Without tenants everybody on this (loopback) address may; admin needs its own key
as soon as one is configured.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from router.api.errors import ApiError
from router.settings import RouterSettings


class Keyring:
    """Knows hashes of keys only; compares in constant time."""

    def __init__(self, settings: RouterSettings, environ: Mapping[str, str]) -> None:
        """Raises SettingsError for a key that is not set: an empty one would let everybody in."""
        settings.require_keys(environ)
        self._tenants = [
            (tenant.name, _digest(environ[tenant.key_env].encode())) for tenant in settings.tenants
        ]
        admin = settings.admin
        self._admin = None if admin is None else _digest(environ[admin.key_env].encode())

    def tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the tenant of a request, "" where none are configured. Raises ApiError 401."""
        if not self._tenants:
            return ""
        digest = _digest(_bearer(headers))
        found = ""
        for name, known in self._tenants:
            if hmac.compare_digest(known, digest):
                found = name
        if not found:
            raise ApiError(
                401, "no valid API key; send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )
        return found

    def require_admin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError 401 or 403 unless the admin key is given, where one is configured."""
        if self._admin is None:
            if self._tenants:
                message = (
                    "admin is off: tenants are configured, but no admin key; set admin.key_env"
                )
                raise ApiError(403, message, code="admin_off")
            return
        if not self.is_admin(headers):
            raise ApiError(
                401, "no valid admin key; send 'Authorization: Bearer KEY'", code="invalid_api_key"
            )

    def is_admin(self, headers: Mapping[bytes, bytes]) -> bool:
        """Say whether the admin key is configured and given."""
        return self._admin is not None and hmac.compare_digest(
            self._admin, _digest(_bearer(headers))
        )

    @property
    def open(self) -> bool:
        """True where no tenants are configured, so that plan headers need no key."""
        return not self._tenants


def _bearer(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
