"""Connectors: the contract that a queue of any broker fulfils, codecs, and dead letters."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.connectors.base import (
        Confirmation,
        ConnectorError,
        Depth,
        Release,
        Settlement,
        SettlementRequest,
        SettleResult,
        UndecodableError,
    )
    from ergon_framework.connectors.bridge import as_async, as_sync
    from ergon_framework.connectors.codec import Codec, JsonCodec, decode
    from ergon_framework.connectors.credentials import Credentials, credentials_from_files
    from ergon_framework.connectors.dead_letters import (
        DeadLetterQuery,
        DeadLetterRecord,
        DeadLetterResult,
        ReplayResult,
        paginate,
    )
    from ergon_framework.connectors.encryption import EncryptingCodec
    from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header, from_json_pointer
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "base": (
                "Confirmation",
                "ConnectorError",
                "Depth",
                "Release",
                "Settlement",
                "SettlementRequest",
                "SettleResult",
                "UndecodableError",
            ),
            "bridge": ("as_async", "as_sync"),
            "codec": ("Codec", "JsonCodec", "decode"),
            "credentials": ("Credentials", "credentials_from_files"),
            "encryption": ("EncryptingCodec",),
            "dead_letters": ("DeadLetterQuery", "DeadLetterRecord", "DeadLetterResult", "ReplayResult", "paginate"),
            "foreign_codec": ("ForeignCodec", "from_header", "from_json_pointer"),
        },
    )

__all__ = [
    "Codec",
    "Confirmation",
    "ConnectorError",
    "Credentials",
    "DeadLetterQuery",
    "DeadLetterRecord",
    "DeadLetterResult",
    "Depth",
    "EncryptingCodec",
    "ForeignCodec",
    "JsonCodec",
    "Release",
    "ReplayResult",
    "SettleResult",
    "Settlement",
    "SettlementRequest",
    "UndecodableError",
    "as_async",
    "as_sync",
    "credentials_from_files",
    "decode",
    "from_header",
    "from_json_pointer",
    "paginate",
]
