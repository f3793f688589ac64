"""Names in the keys of the provider state: validation, and how a scope is stored.

A scope is a tenant, a provider and a capability, which is a group of the provider's operations; a scope may be shared
by all tenants.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ergon_framework.providers.errors import ProviderBadRequestError
from ergon_framework.providers.state import ProviderScope

#: The stored tenant of the scope of all tenants; no tenant may have this name.
ALL_TENANTS: Final = "*"
#: Maximum bytes of a tenant, a provider or a capability, and of a key: together they must fit into an index.
MAX_NAME_BYTES: Final = 255
MAX_KEY_BYTES: Final = 1024
#: A name of at most this many characters never exceeds the maximum number of bytes.
_SAFE_NAME_CHARS: Final = MAX_NAME_BYTES // 4


@lru_cache(maxsize=1024)
def scope_key(scope: ProviderScope) -> str:
    """Return the tenant under which *scope* is stored; raise ProviderBadRequestError for invalid names."""
    tenant = scope.tenant_id
    if tenant is None:
        tenant = ALL_TENANTS
    else:
        check_tenant(tenant)
    check_name("provider", scope.provider_name)
    check_name("capability", scope.capability)
    return tenant


def parse_scope_key(tenant: str, provider_name: str, capability: str) -> ProviderScope:
    """Return the scope that is stored under these names."""
    return ProviderScope(None if tenant == ALL_TENANTS else tenant, provider_name, capability)


def check_tenant(tenant: str) -> None:
    """Reject a tenant name that stands for all tenants."""
    check_name("tenant", tenant)
    if tenant == ALL_TENANTS:
        raise ProviderBadRequestError(
            f"tenant name {ALL_TENANTS!r} is reserved: it stands for all tenants", code="name_refused", sent=False
        )


def check_name(what: str, name: str, max_bytes: int = MAX_NAME_BYTES) -> None:
    """Reject a name that is empty, too long for an index, or not storable as text."""
    if 0 < len(name) <= _SAFE_NAME_CHARS and name.isascii() and "\0" not in name:
        return
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= max_bytes or "\0" in name:
        raise ProviderBadRequestError(
            f"invalid {what}: expected 1 to {max_bytes} bytes of UTF-8 without NUL",
            code="name_refused",
            sent=False,
        )
