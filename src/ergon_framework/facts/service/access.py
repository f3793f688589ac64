"""AccessPolicy: decides which calls an identity may make at a boundary, without I/O.

The store belongs to its own zones, which append facts and store artifacts there. Every other zone reads what is from
it or for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ergon_framework.facts.boundary import LogState, ObjectInfo
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown
from ergon_framework.facts.model import SENDER_PREFIX, ZonePair, check_zone, zone_of_reader
from ergon_framework.facts.service.identity import Identity

#: Maximum readers of a zone in a store of other zones.
MAX_READERS = 100


class AccessPolicy:
    """The access rules of one service, whose store belongs to *zones*."""

    def __init__(self, zones: Collection[str], *, max_readers: int = MAX_READERS) -> None:
        for zone in zones:
            check_zone("zone", zone)
        self._own = frozenset(zones)
        self._max_readers = max_readers

    def check_append_any(self, identity: Identity) -> None:
        """Raise AccessDenied unless *identity* may append at all; checked before a request is received."""
        if not identity.zones & self._own:
            raise AccessDenied(f"facts are appended by {self._owner_names} only, and this is {identity.name}")

    def check_append(self, identity: Identity, zones: Iterable[str]) -> None:
        """Raise AccessDenied unless *identity* may append as all of these zones."""
        for zone in zones:
            if zone not in identity.zones:
                # The name is untrusted and is repeated in the error, so it must be a valid zone name.
                check_zone("from_zone", zone)
                raise AccessDenied(f"facts from {zone!r} are appended by that zone only, and this is {identity.name}")
            if zone not in self._own:
                raise AccessDenied(
                    f"{zone!r} appends to a store of its own, and this one belongs to {self._owner_names}: facts from "
                    "elsewhere arrive here over the line"
                )

    def check_lookup(self, identity: Identity, from_zone: str) -> None:
        """Raise AccessDenied unless *identity* may look up a fact from that zone."""
        if from_zone not in identity.zones and identity.operator is None:
            raise AccessDenied(f"only {from_zone!r} may ask what became of its facts, and this is {identity.name}")

    def check_cursor(self, identity: Identity, pair: ZonePair) -> None:
        """Raise AccessDenied unless *identity* may query the cursors of *pair*."""
        if identity.operator is None and not involves_zone(identity, pair):
            raise _other_zones_error(identity, pair)

    def check_read(self, identity: Identity, pair: ZonePair, reader: str) -> None:
        """Raise AccessDenied unless *identity* may read *pair* as *reader*, and confirm in that name."""
        if not involves_zone(identity, pair):
            raise _other_zones_error(identity, pair)
        owner = zone_of_reader(reader, pair)
        if owner not in identity.zones:
            raise AccessDenied(
                f"the reader {reader!r} belongs to {owner!r}, and this is {identity.name}; whoever reads back what he "
                f"has sent takes a name that begins with {SENDER_PREFIX!r}"
            )

    def max_readers(self, pair: ZonePair, reader: str) -> int | None:
        """Return the maximum readers of the zone of *reader*; None if it is a zone of the store."""
        return None if zone_of_reader(reader, pair) in self._own else self._max_readers

    def concerns(self, pair: ZonePair) -> bool:
        """Return whether a zone of the store sends or receives the facts of *pair*."""
        return not self._own.isdisjoint(pair)

    def unknown_pair_error(self, pair: ZonePair) -> AccessDenied:
        """Return the error for a pair that has no facts here and no zone of the store."""
        return AccessDenied(
            f"there are no facts from {pair.from_zone!r} to {pair.to_zone!r} in this store, which belongs to "
            f"{self._owner_names}; ask where one of the two zones is at home"
        )

    def check_put(self, identity: Identity, zone: str = "") -> str:
        """Return the owner of what *identity* stores as *zone*: empty if the zones of the store share it.

        A store of one zone needs no owners. In a store of several zones, each zone has its own namespace.
        """
        own_zones = identity.zones & self._own
        if not own_zones or (zone and zone not in own_zones):
            stored_by = repr(zone) if zone and zone not in identity.zones else self._owner_names
            raise AccessDenied(f"artifacts are stored here by {stored_by} only, and this is {identity.name}")
        if len(self._own) == 1:
            return ""
        return zone or (next(iter(own_zones)) if len(own_zones) == 1 else "")

    def own_zones(self, identity: Identity) -> frozenset[str]:
        """Return the zones of the store that *identity* represents."""
        return identity.zones & self._own

    def list_owners(self, identity: Identity, zone: str = "") -> Sequence[str]:
        """Return the owners whose artifacts are searched, in order, when *identity* requests one of *zone*."""
        if zone:
            return (zone, "") if zone in self._own else (zone,)
        if identity.zones & self._own:
            return (*sorted(identity.zones & self._own), "")
        # Without an owner, the caller means the zones of the store, or reads back its own artifacts.
        return ("", *sorted(self._own), *sorted(identity.zones))

    def check_get(self, identity: Identity, bucket: str, key: str, info: ObjectInfo | None) -> None:
        """Raise ArtifactUnknown unless *identity* owns the artifact or a retained fact of the owner is for its zone.

        For any other caller the artifact does not exist, whether it is stored or not. Owners pass this check also for
        a missing artifact.
        """
        owners = self._own if info is None or not info.zone else frozenset((info.zone,))
        if identity.zones & owners:
            return
        referenced_by = frozenset[ZonePair]() if info is None else info.referenced_by
        if not any(pair.from_zone in owners and pair.to_zone in identity.zones for pair in referenced_by):
            raise ArtifactUnknown(
                f"no retained fact of its owner for {identity.name} names an artifact {bucket}/{key}; give the zone "
                "that the fact comes from"
            )

    def require_operator(self, identity: Identity) -> str:
        """Return the name of the operator; raise AccessDenied for all other identities."""
        if identity.operator is None:
            raise AccessDenied(
                f"it takes the certificate of an operator, ergon://operator/NAME, and this is {identity.name}"
            )
        return identity.operator

    def filter_visible(self, identity: Identity, logs: Iterable[LogState]) -> list[LogState]:
        """Return the logs that *identity* may see."""
        return [log for log in logs if identity.operator is not None or involves_zone(identity, log.pair)]

    @property
    def _owner_names(self) -> str:
        return ", ".join(map(repr, sorted(self._own))) or "nobody"


def involves_zone(identity: Identity, pair: ZonePair) -> bool:
    """Return whether a zone pair is from or for *identity*."""
    return not identity.zones.isdisjoint(pair)


def _other_zones_error(identity: Identity, pair: ZonePair) -> AccessDenied:
    return AccessDenied(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are for these two zones only, and this is {identity.name}"
    )
