"""Texts for TLS connections that fail: why the certificate of a server is refused, and what to do."""

from __future__ import annotations

import ssl
from typing import Final

#: OpenSSL's codes of verification errors that need another remedy than a trusted authority.
_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_WRONG_NAMES: Final = frozenset({62, 64})


def explain_certificate_error(error: BaseException, *, trust: str) -> str | None:
    """Return why a certificate is refused, if *error* or one of its causes says that; None for other errors.

    *trust* is the option that names the trusted authorities.

    >>> explain_certificate_error(OSError("refused"), trust="ca_file=") is None
    True
    """
    refusal = _find_refusal(error)
    if refusal is None:
        return None
    code, reason = refusal.verify_code, refusal.verify_message
    if code == _EXPIRED:
        return f"the certificate of the server is refused: {reason}; renew it on the server"
    if code == _NOT_YET_VALID:
        return f"the certificate of the server is refused: {reason}; compare the clocks of the server and this machine"
    if code in _WRONG_NAMES:
        return (
            f"the certificate of the server is refused: {reason.rstrip('.')}; use a name of the certificate in the "
            "address, or issue a certificate for this one"
        )
    return (
        f"the certificate of the server is refused: {reason}; set {trust} to the certificate of the authority that "
        "signed it"
    )


def _find_refusal(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
