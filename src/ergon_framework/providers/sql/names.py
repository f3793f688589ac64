"""Names: what may stand in the books' keys, and how an account is written there."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ergon_framework.providers.books import Account
from ergon_framework.providers.errors import ProviderBadRequestError

#: How the account of all tenants together is written; no tenant may be called so.
ALL: Final = "*"
#: The most bytes of a tenant, a provider or a capability, and of a key: together they must fit into an index.
NAME: Final = 255
KEY: Final = 1024
#: So many characters are never more bytes than a name may have.
_SHORT: Final = NAME // 4


@lru_cache(maxsize=1024)
def owner_of(account: Account) -> str:
    """The tenant under which *account* is written; ProviderBadRequestError for names that cannot be."""
    tenant = account.tenant_id
    if tenant is None:
        tenant = ALL
    else:
        check_tenant(tenant)
    check("provider", account.provider_name)
    check("capability", account.capability)
    return tenant


def account_of(tenant: str, provider_name: str, capability: str) -> Account:
    """The account that is written so."""
    return Account(None if tenant == ALL else tenant, provider_name, capability)


def check_tenant(tenant: str) -> None:
    """Refuse a tenant whose rows would be all tenants'."""
    check("tenant", tenant)
    if tenant == ALL:
        raise ProviderBadRequestError(
            f"no tenant can be called {ALL!r}: it stands for all of them", code="name_refused", sent=False
        )


def check(what: str, name: str, longest: int = NAME) -> None:
    """Refuse what is empty, too long for an index, or no text that the database can hold."""
    if 0 < len(name) <= _SHORT and name.isascii() and "\0" not in name:
        return
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= longest or "\0" in name:
        raise ProviderBadRequestError(
            f"a {what} has 1 to {longest} bytes of UTF-8 and no NUL; this one cannot be kept in the books",
            code="name_refused",
            sent=False,
        )
